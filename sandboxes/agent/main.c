#include "agent.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <unistd.h>

static void forward(uint8_t type, uint32_t channel, struct reader *payload) {
    if (type == DATA) {
        if (!command_data(channel, payload->at, payload->left)) file_data(channel, payload->at, payload->left);
    } else if (type == END) {
        if (!command_end(channel)) file_end(channel);
    } else if (type == CANCEL) {
        if (!command_cancel(channel)) file_cancel(channel);
    } else if (type == CREDIT) {
        uint32_t bytes = take_u32(payload);
        if (!command_credit(channel, bytes)) file_credit(channel, bytes);
    } else {
        die("the controller sent a frame of a kind that is not known");
    }
}

static void dispatch(uint8_t type, uint32_t channel, struct reader *payload) {
    switch (type) {
        case EXEC: command_start(channel, payload); break;
        case READ: file_read(channel, payload); break;
        case WRITE: file_write(channel, payload); break;
        case PING: send_done(channel); break;
        case LIST: folder_list(channel, payload); break;
        case MKDIR: file_mkdir(channel, payload); break;
        case SYMLINK: file_symlink(channel, payload); break;
        case REMOVE: folder_remove(channel, payload); break;
        case KILL_ALL: commands_kill_all(channel); break;
        case PAUSE: root_pause(channel); break;
        case RESUME: root_resume(channel); break;
        default: forward(type, channel, payload);
    }
}

/* Requests wait while much output is unsent, to limit the memory for answers such as listings. */
static bool may_dispatch(void) { return wire_backlog() <= OUTPUT_SOFT_LIMIT; }

static void dispatch_all(void) {
    uint8_t type;
    uint32_t channel;
    struct reader payload;
    while (may_dispatch() && wire_next(&type, &channel, &payload)) dispatch(type, channel, &payload);
}

static void greet(void) {
    unsigned char frame[4], *at = frame;
    put_u32(&at, PROTOCOL_VERSION);
    wire_send(READY, 0, frame, sizeof frame);
}

static int prepare(void) {
    sigset_t mask;
    sigemptyset(&mask);
    sigaddset(&mask, SIGCHLD);
    signal(SIGPIPE, SIG_IGN);
    sigprocmask(SIG_BLOCK, &mask, NULL);
    int signals = signalfd(-1, &mask, SFD_NONBLOCK | SFD_CLOEXEC);
    if (signals < 0) die("signalfd is not available");
    struct rlimit none = {1, 1}; /* with 0 the kernel would still pipe memory to a host program (core_pattern) */
    setrlimit(RLIMIT_CORE, &none);
    umask(022);
    if (prctl(PR_SET_DUMPABLE, 0) < 0) die("the agent cannot be protected from being traced");
    members_prepare();
    confine();
    wire_start();
    commands_prepare();
    return signals;
}

enum { LOOK_EVERY_US = 1000000 };
static int64_t look_us; /* when members_limit_kernel_memory is due; 0 while there are no processes */

/* Counting takes 10 ms, in which the kernel waits for all processors: short commands never wait for it. */
static void look_at_kernel_memory(void) {
    bool is_due = look_us && now_us() >= look_us;
    if (is_due) members_limit_kernel_memory();
    if (!members_exist()) look_us = 0;
    else if (is_due || !look_us) look_us = now_us() + LOOK_EVERY_US;
}

static int wait_ms(void) {
    int64_t deadline = commands_deadline();
    if (look_us && (!deadline || look_us < deadline)) deadline = look_us;
    if (files_waiting() || (may_dispatch() && (wire_waits() || commands_wait()))) return 0;
    if (!deadline) return -1;
    int64_t left = deadline - now_us();
    return left <= 0 ? 0 : (int)(left / 1000 > 60000 ? 60000 : left / 1000 + 1);
}

static void loop(int signals) {
    static struct pollfd entries[2 + 4 * MAX_CHANNELS];
    for (;;) {
        entries[0] = (struct pollfd){0, POLLIN, 0};
        entries[1] = (struct pollfd){signals, POLLIN, 0};
        size_t count = 2 + commands_poll(entries + 3, sizeof entries / sizeof *entries - 3);
        entries[2] = (struct pollfd){wire_backlog() ? 1 : -1, POLLOUT, 0};
        if (poll(entries, count + 1, wait_ms()) < 0 && errno != EINTR) die("poll failed");
        if (entries[2].revents & (POLLERR | POLLNVAL)) _exit(0);
        commands_ready(entries + 3, count - 2);
        if (entries[1].revents) {
            struct signalfd_siginfo information; /* there is one at most, and code inside may send the next at once */
            if (read(signals, &information, sizeof information) > 0) commands_reap();
        }
        if (entries[0].revents) wire_read();
        dispatch_all();
        commands_tick();
        look_at_kernel_memory();
        files_pump();
        wire_flush();
    }
}

int main(int count, char **words) {
    if (count > 2 && !strcmp(words[1], "--folders")) return folders(count - 2, words + 2);
    if (count > 2 && !strcmp(words[1], "--relay")) relay((uint16_t)atoi(words[2]));
    if (count > 2 && !strcmp(words[1], "--keep-root")) {
        root_keep(strtoull(words[2], NULL, 10));
        return 0;
    }
    if (count > 1 && !strcmp(words[1], "--root")) root_enter(words + 2, (size_t)count - 2);
    int signals = prepare();
    greet();
    wire_flush();
    loop(signals);
}
