/* Frames on stdin and stdout. All buffers are bounded; if the controller breaks the protocol, the agent ends. */
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static unsigned char *input;
static size_t input_used, input_taken, input_size;
static unsigned char *output;
static size_t output_used, output_sent, output_size;

int64_t now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

/* Pace of output. The controller's loop serves all sandboxes, and a piece of one byte takes as long there as a full
 * one. A sender may be PACE_AHEAD_US ahead of its costs; what comes before `due_us` is collected and sent as one piece. */
enum { PACE_AHEAD_US = 64000 };

bool pace_allows(int64_t due_us) { return due_us <= now_us(); }

void pace_count(int64_t *due_us, int64_t cost_us) {
    int64_t earliest = now_us() - PACE_AHEAD_US;
    *due_us = (*due_us > earliest ? *due_us : earliest) + cost_us;
}

void die(const char *what) {
    dprintf(2, "roll-flash agent: %s\n", what);
    _exit(70);
}

static void *grow(void *data, size_t *size, size_t wanted) {
    size_t next = *size ? *size : CHUNK;
    while (next < wanted) next *= 2;
    if (next == *size) return data;
    void *moved = realloc(data, next);
    if (!moved) die("out of memory");
    *size = next;
    return moved;
}

void wire_start(void) {
    for (int fd = 0; fd < 2; fd++) {
        int flags = fcntl(fd, F_GETFL);
        if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0) die("stdin and stdout must be open");
        fcntl(fd, F_SETFD, FD_CLOEXEC);
    }
}

void wire_read(void) {
    if (input_taken) {
        memmove(input, input + input_taken, input_used - input_taken);
        input_used -= input_taken;
        input_taken = 0;
    }
    input = grow(input, &input_size, input_used + CHUNK);
    ssize_t got = read(0, input + input_used, input_size - input_used);
    if (got == 0) _exit(0);
    if (got < 0 && errno != EAGAIN && errno != EINTR) _exit(0);
    if (got > 0) input_used += (size_t)got;
}

static uint32_t little_u32(const unsigned char *at) {
    return at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

/* True if a complete unread frame is available. */
bool wire_waits(void) {
    size_t left = input_used - input_taken;
    return left >= HEADER_BYTES && left >= HEADER_BYTES + little_u32(input + input_taken + 5);
}

bool wire_next(uint8_t *type, uint32_t *channel, struct reader *payload) {
    size_t left = input_used - input_taken;
    if (left < HEADER_BYTES) return false;
    const unsigned char *at = input + input_taken;
    uint32_t length = little_u32(at + 5);
    if (length > MAX_PAYLOAD) die("the controller sent a frame that is too long");
    if (left < HEADER_BYTES + length) return false;
    *type = at[0];
    *channel = little_u32(at + 1);
    *payload = (struct reader){at + HEADER_BYTES, length, false};
    input_taken += HEADER_BYTES + length;
    return true;
}

void wire_send(uint8_t type, uint32_t channel, const void *data, size_t length) {
    if (output_used + HEADER_BYTES + length - output_sent > OUTPUT_HARD_LIMIT) die("the controller does not read");
    output = grow(output, &output_size, output_used + HEADER_BYTES + length);
    unsigned char *at = output + output_used;
    *at++ = type;
    put_u32(&at, channel);
    put_u32(&at, (uint32_t)length);
    if (length) memcpy(at, data, length);
    output_used += HEADER_BYTES + length;
}

void wire_flush(void) {
    while (output_sent < output_used) {
        ssize_t sent = write(1, output + output_sent, output_used - output_sent);
        if (sent < 0) {
            if (errno == EINTR) continue;
            if (errno == EAGAIN) break;
            _exit(0);
        }
        output_sent += (size_t)sent;
    }
    if (output_sent == output_used) {
        output_sent = output_used = 0;
        if (output_size > 4 * OUTPUT_SOFT_LIMIT) {
            free(output);
            output = NULL;
            output_size = 0;
        }
    } else if (output_sent > OUTPUT_SOFT_LIMIT) {
        memmove(output, output + output_sent, output_used - output_sent);
        output_used -= output_sent;
        output_sent = 0;
    }
}

size_t wire_backlog(void) { return output_used - output_sent; }

uint32_t take_u32(struct reader *reader) {
    if (reader->left < 4) {
        reader->bad = true;
        return 0;
    }
    uint32_t value = little_u32(reader->at);
    reader->at += 4;
    reader->left -= 4;
    return value;
}

uint64_t take_u64(struct reader *reader) {
    uint64_t low = take_u32(reader);
    return low | (uint64_t)take_u32(reader) << 32;
}

char *take_string(struct reader *reader) {
    uint32_t length = take_u32(reader);
    if (reader->bad || length > reader->left) {
        reader->bad = true;
        return NULL;
    }
    char *text = malloc((size_t)length + 1);
    if (!text) die("out of memory");
    memcpy(text, reader->at, length);
    text[length] = 0;
    reader->at += length;
    reader->left -= length;
    return text;
}

void put_u32(unsigned char **at, uint32_t value) {
    for (int byte = 0; byte < 4; byte++) *(*at)++ = (unsigned char)(value >> (8 * byte));
}

void put_u64(unsigned char **at, uint64_t value) {
    put_u32(at, (uint32_t)value);
    put_u32(at, (uint32_t)(value >> 32));
}

void send_error(uint32_t channel, int error, const char *what) {
    unsigned char frame[512], *at = frame;
    put_u32(&at, (uint32_t)error);
    int length = snprintf((char *)at, sizeof frame - 4, "%s: %s", what, strerror(error));
    if (length > (int)sizeof frame - 5) length = (int)sizeof frame - 5;
    wire_send(ERROR, channel, frame, 4 + (size_t)length);
}

void send_done(uint32_t channel) { wire_send(DONE, channel, NULL, 0); }
