#ifndef ROLL_FLASH_OUTPUT_H
#define ROLL_FLASH_OUTPUT_H

#include "agent.h"

/* One output pipe. With a cap the first and the last bytes are kept here and sent at the end; without one they are
 * sent as they come, as far as the controller granted. */
struct output {
    int fd;
    uint64_t total;
    unsigned char *kept;
    size_t size;
    size_t next;      /* where the ring of last bytes continues, once `total` is past the cap */
    int64_t left;     /* bytes still to read after the command ended, -1 while it runs */
};

void output_keep(struct output *output, size_t cap, const unsigned char *data, size_t length);
void output_send(const struct output *output, size_t cap, uint8_t type, uint32_t channel);

#endif
