#ifndef ROLL_FLASH_SPAWN_H
#define ROLL_FLASH_SPAWN_H

#include "agent.h"

struct request {
    uint32_t timeout_ms, grace_ms, cap, window, flags;
    char *directory, **words, **settings;
};

bool request_take(struct request *request, struct reader *payload);
void request_free(struct request *request);
pid_t spawn(const struct request *request, const int fds[3], uint64_t number, int *error);

#endif
