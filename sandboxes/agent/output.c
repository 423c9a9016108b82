/* The first and the last bytes of a command's output. */
#include "agent.h"

#include <stdlib.h>
#include <string.h>

/* Keeps the first cap/2 bytes, and the last bytes in a ring of the other half. */
void output_keep(struct output *output, size_t cap, const unsigned char *data, size_t length) {
    size_t first = cap / 2, seen = output->total > cap ? cap : (size_t)output->total;
    size_t linear = length < cap - seen ? length : cap - seen;
    if (linear) {
        if (seen + linear > output->size) {
            size_t size = output->size ? output->size : 4096;
            while (size < seen + linear) size *= 2;
            if (size > cap) size = cap;
            if (!(output->kept = realloc(output->kept, size))) die("out of memory");
            output->size = size;
        }
        memcpy(output->kept + seen, data, linear);
        output->next = first;
    }
    output->total += length;
    data += linear;
    length -= linear;
    size_t ring = cap - first;
    if (length > ring) {
        data += length - ring;
        length = ring;
    }
    while (length) {
        size_t room = cap - output->next, part = length < room ? length : room;
        memcpy(output->kept + output->next, data, part);
        data += part;
        length -= part;
        output->next += part;
        if (output->next == cap) output->next = first;
    }
}

static void send_bytes(uint8_t type, uint32_t channel, const unsigned char *data, size_t length) {
    while (length) {
        size_t part = length < CHUNK ? length : CHUNK;
        wire_send(type, channel, data, part);
        data += part;
        length -= part;
    }
}

void output_send(const struct output *output, size_t cap, uint8_t type, uint32_t channel) {
    size_t first = cap / 2;
    if (output->total <= cap) {
        send_bytes(type, channel, output->kept, (size_t)output->total);
        return;
    }
    send_bytes(type, channel, output->kept, first);
    send_bytes(type, channel, output->kept + output->next, cap - output->next);
    send_bytes(type, channel, output->kept + first, output->next - first);
}
