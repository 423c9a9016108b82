#ifndef ROLL_FLASH_OUTPUT_H
#define ROLL_FLASH_OUTPUT_H

#include "agent.h"

/* One output pipe. With a cap, the first and the last bytes are kept here and sent at the end; without a cap, bytes are
 * sent at once, within the controller's credit. */
struct output {
    int fd;
    uint64_t total;
    unsigned char *kept;
    size_t size;
    size_t next;      /* next position in the ring of last bytes, once `total` exceeds the cap */
    int64_t left;     /* bytes left to read after the command's end, -1 while it runs */
};

void output_keep(struct output *output, size_t cap, const unsigned char *data, size_t length);
void output_send(const struct output *output, size_t cap, uint8_t type, uint32_t channel);

#endif
