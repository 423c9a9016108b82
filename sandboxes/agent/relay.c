/* `agent --relay PORT`: connections to 127.0.0.1:PORT inside become channels on stdin and stdout. The controller at the
 * other end decides their destinations; the sandbox itself has no network.
 *
 * Each direction of each connection has WINDOW bytes of credit, the maximum of unread data. So a slow reader does not
 * block other connections. More connections than MOST wait in the listener's queue. */
#include "agent.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MOST = 128, ACCEPTED = 1 };
/* At most 2,000 pieces per second, or 250 connections, each with its frames and its task in the controller. */
enum { PIECE_COST_US = 500, CONNECTION_COST_US = 4000 };

struct joined {
    int fd;
    uint32_t channel;
    int64_t credit; /* bytes that may still be read from the connection */
    unsigned char *pending;
    size_t used;
    bool read_ended, write_ends, broken;
};

static struct joined joined[MOST];
static size_t count;
static size_t first; /* the connection that is read first: each has its turn when there are more pieces than may be sent */
static int64_t due_us;

static void drop(size_t index) {
    if (!joined[index].read_ended) wire_send(END, joined[index].channel, NULL, 0);
    wire_send(CANCEL, joined[index].channel, NULL, 0); /* else the controller would wait for credit forever */
    close(joined[index].fd);
    free(joined[index].pending);
    joined[index] = joined[--count];
}

static int listen_on(uint16_t port) {
    struct sockaddr_in where = {.sin_family = AF_INET, .sin_port = htons(port)};
    where.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), yes = 1;
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) < 0 ||
        bind(fd, (struct sockaddr *)&where, sizeof where) < 0 || listen(fd, SOMAXCONN) < 0) {
        dprintf(2, "the relay cannot listen on port %d: %s\n", port, strerror(errno));
        _exit(70);
    }
    return fd;
}

static void take(int listener) {
    static uint32_t last;
    int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) return;
    joined[count++] = (struct joined){.fd = fd, .channel = ++last, .credit = WINDOW};
    pace_count(&due_us, CONNECTION_COST_US);
    wire_send(ACCEPTED, last, NULL, 0);
}

static void grant(const struct joined *one, size_t bytes) {
    unsigned char frame[4], *at = frame;
    put_u32(&at, (uint32_t)bytes);
    wire_send(CREDIT, one->channel, frame, sizeof frame);
}

/* Discards data for a broken connection and grants its credit: the controller must not wait for it. */
static void write_pending(struct joined *one) {
    size_t sent = 0;
    while (sent < one->used && !one->broken) {
        ssize_t took = write(one->fd, one->pending + sent, one->used - sent);
        if (took < 0 && (errno == EAGAIN || errno == EINTR)) break;
        if (took < 0) one->broken = true;
        else sent += (size_t)took;
    }
    if (one->broken) sent = one->used;
    if (sent) {
        memmove(one->pending, one->pending + sent, one->used - sent);
        one->used -= sent;
        grant(one, sent);
    }
    if (one->write_ends && one->used == 0) shutdown(one->fd, SHUT_WR);
}

static void read_some(struct joined *one) {
    static unsigned char scratch[CHUNK];
    if (!pace_allows(due_us)) return;
    size_t wanted = one->credit < CHUNK ? (size_t)one->credit : CHUNK;
    ssize_t got = read(one->fd, scratch, wanted);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got > 0) {
        one->credit -= got;
        pace_count(&due_us, PIECE_COST_US);
        wire_send(DATA, one->channel, scratch, (size_t)got);
        return;
    }
    one->read_ended = true;
    wire_send(END, one->channel, NULL, 0);
}

static bool over(const struct joined *one) { return one->read_ended && one->used == 0 && (one->write_ends || one->broken); }

static void add_pending(struct joined *one, const struct reader *payload) {
    if (one->used + payload->left > WINDOW) die("the controller sent more than was granted");
    if (!one->pending && !(one->pending = malloc(WINDOW))) die("out of memory");
    memcpy(one->pending + one->used, payload->at, payload->left);
    one->used += payload->left;
}

static void receive(uint8_t type, uint32_t channel, struct reader *payload) {
    size_t index = 0;
    while (index < count && joined[index].channel != channel) index++;
    if (index == count) return;
    struct joined *one = &joined[index];
    if (type == CANCEL) one->read_ended = one->write_ends = true; /* pending data is still written */
    if (type == CREDIT) one->credit += take_u32(payload);
    if (type == DATA && payload->left) add_pending(one, payload);
    if (type == END) one->write_ends = true;
    if (type != CREDIT) write_pending(one);
    if (over(one)) drop(index);
}

static void serve(const struct pollfd *entries, size_t polled) {
    for (size_t i = 0; i < polled; i++) {
        size_t index = (first + i) % polled;
        short seen = entries[index].revents;
        if (joined[index].used && seen & (POLLOUT | POLLHUP | POLLERR)) write_pending(&joined[index]);
        if (entries[index].events & POLLIN && seen & (POLLIN | POLLHUP | POLLERR)) read_some(&joined[index]);
    }
    first++;
    for (size_t i = polled; i-- > 0;)
        if (over(&joined[i])) drop(i);
}

static size_t poll_all(int listener, struct pollfd *entries) {
    int64_t wait_us = due_us - now_us();
    bool may_read = wire_backlog() <= OUTPUT_SOFT_LIMIT && wait_us <= 0;
    entries[0] = (struct pollfd){0, POLLIN, 0};
    entries[1] = (struct pollfd){wire_backlog() ? 1 : -1, POLLOUT, 0};
    entries[2] = (struct pollfd){count < MOST && wait_us <= 0 ? listener : -1, POLLIN, 0};
    for (size_t i = 0; i < count; i++) {
        bool reads = may_read && !joined[i].read_ended && joined[i].credit > 0;
        short wanted = (short)((reads ? POLLIN : 0) | (joined[i].used ? POLLOUT : 0));
        entries[3 + i] = (struct pollfd){wanted ? joined[i].fd : -1, wanted, 0};
    }
    size_t polled = count;
    if (poll(entries, 3 + polled, wait_us > 0 ? (int)(wait_us / 1000) + 1 : -1) < 0 && errno != EINTR) die("poll failed");
    return polled;
}

void relay(uint16_t port) {
    signal(SIGPIPE, SIG_IGN);
    prctl(PR_SET_DUMPABLE, 0);
    int listener = listen_on(port);
    wire_start();
    wire_send(READY, 0, NULL, 0);
    wire_flush();
    for (;;) {
        struct pollfd entries[3 + MOST];
        size_t polled = poll_all(listener, entries);
        serve(entries + 3, polled);
        if (entries[2].revents) take(listener);
        if (entries[0].revents) {
            uint8_t type;
            uint32_t channel;
            struct reader payload;
            wire_read();
            while (wire_next(&type, &channel, &payload)) receive(type, channel, &payload);
        }
        wire_flush();
    }
}
