/* The commands that run in parallel, each with its own channel. */
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

enum { KILL_ALL_US = 5000000 };
enum { DEATH_US = 2000000, DEATH_POLL_US = 2000 }; /* maximum wait for the death of killed processes */
enum { PIECE_COST_US = 250 }; /* at most 4,000 pieces of streamed output per second and command, see pace_count */
enum { BIRTH_US = 100000, MANY_ESCAPES = 16 };      /* a process started over BIRTH_US after the kill has escaped */

struct command {
    uint64_t number;
    uint32_t channel, cap, flags, ended, escapes;
    pid_t pid;
    struct output output[2];
    int64_t credit, piece_due_us, started_us, deadline_us, grace_us, kill_us, dead_by_us, killed_us;
    int input;
    unsigned char *pending;
    size_t pending_used;
    bool input_ends, exited;
    int status;
    struct rusage usage;
    struct command *next;
};

static struct command *commands;
static uint32_t alive;
static uint64_t started;
static int ignored[MAX_CHANNELS]; /* pipes that a background child keeps open: read and discarded */
static bool held_back; /* true if ended commands wait to send their output */
static size_t ignored_count, ignored_most;
static int nothing; /* /dev/null, opened before code inside could replace it by a file whose opening blocks */
static unsigned char scratch[4 * CHUNK];

/* Reserves file descriptors for new commands, and for the search of processes at a timeout. */
void commands_prepare(void) {
    struct rlimit files;
    nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (nothing < 0 || getrlimit(RLIMIT_NOFILE, &files) < 0) die("/dev/null cannot be opened");
    ignored_most = files.rlim_cur / 4 < MAX_CHANNELS ? (size_t)files.rlim_cur / 4 - 2 : MAX_CHANNELS;
}

bool commands_wait(void) { return held_back; }

static struct command *find(uint32_t channel) {
    for (struct command *at = commands; at; at = at->next)
        if (at->channel == channel) return at;
    return NULL;
}

static void send_exit(struct command *command, int32_t code, uint32_t signal_number) {
    unsigned char frame[64], *at = frame;
    put_u32(&at, command->ended);
    put_u32(&at, (uint32_t)code);
    put_u32(&at, signal_number);
    put_u64(&at, command->output[0].total);
    put_u64(&at, command->output[1].total);
    put_u64(&at, (uint64_t)(now_us() - command->started_us));
    put_u64(&at, (uint64_t)command->usage.ru_utime.tv_sec * 1000000 + (uint64_t)command->usage.ru_utime.tv_usec +
                     (uint64_t)command->usage.ru_stime.tv_sec * 1000000 + (uint64_t)command->usage.ru_stime.tv_usec);
    put_u64(&at, (uint64_t)command->usage.ru_maxrss);
    wire_send(EXIT, command->channel, frame, (size_t)(at - frame));
}

static void not_started(struct command *command, int error, const char *what) {
    unsigned char text[512];
    int length = snprintf((char *)text, sizeof text, "%.400s: %s\n", what, strerror(error));
    command->output[1].total = (uint64_t)length;
    command->ended |= EXIT_NOT_STARTED | (error == EAGAIN ? EXIT_BUSY : 0);
    wire_send(ERR, command->channel, text, (size_t)length);
    send_exit(command, error == ENOENT || error == ENOTDIR ? 127 : 126, 0);
}

static void close_fd(int *fd) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

static int open_pipes(struct command *command, int child[3]) {
    int ends[2];
    child[0] = child[1] = child[2] = -1;
    if (command->flags & EXEC_STDIN) {
        if (pipe2(ends, O_CLOEXEC) < 0) return errno;
        child[0] = ends[0];
        command->input = ends[1];
        fcntl(ends[1], F_SETFL, O_NONBLOCK);
    } else if ((child[0] = fcntl(nothing, F_DUPFD_CLOEXEC, 3)) < 0) {
        return errno;
    }
    for (int i = 0; i < 2; i++) {
        if (i == 1 && command->flags & EXEC_MERGE) {
            child[2] = child[1];
            break;
        }
        if (pipe2(ends, O_CLOEXEC) < 0) return errno;
        command->output[i].fd = ends[0];
        child[i + 1] = ends[1];
        fcntl(ends[0], F_SETFL, O_NONBLOCK);
    }
    return 0;
}

static void release(struct command *command) {
    close_fd(&command->input);
    for (int i = 0; i < 2; i++) {
        close_fd(&command->output[i].fd);
        free(command->output[i].kept);
    }
    free(command->pending);
    free(command);
}

void command_start(uint32_t channel, struct reader *payload) {
    struct request request;
    int child[3] = {-1, -1, -1}, error;
    struct command *command = calloc(1, sizeof *command);
    if (!command) die("out of memory");
    command->input = command->output[0].fd = command->output[1].fd = -1;
    command->output[0].left = command->output[1].left = -1;
    if (!request_take(&request, payload) || find(channel)) die("the controller sent a malformed request");
    command->number = ++started;
    command->channel = channel;
    command->cap = request.cap;
    command->flags = request.flags;
    command->credit = request.window;
    command->started_us = now_us();
    command->grace_us = (int64_t)request.grace_ms * 1000;
    command->deadline_us = request.timeout_ms ? command->started_us + (int64_t)request.timeout_ms * 1000 : 0;
    error = alive >= MAX_CHANNELS ? EAGAIN : open_pipes(command, child);
    if (error) not_started(command, error, request.words[0]);
    else command->pid = spawn(&request, child, command->number, &error);
    if (command->pid == 0 && !(command->ended & EXIT_NOT_STARTED)) {
        if (error < 0) not_started(command, -error, request.directory);
        else not_started(command, error, request.words[0]);
    }
    close_fd(&child[0]);
    if (child[2] != child[1]) close_fd(&child[2]);
    close_fd(&child[1]);
    request_free(&request);
    if (command->pid == 0) {
        release(command);
        return;
    }
    command->next = commands;
    commands = command;
    alive++;
}

static void write_input(struct command *command) {
    size_t sent = 0;
    while (sent < command->pending_used) {
        ssize_t took = command->input < 0 ? -1 : write(command->input, command->pending + sent, command->pending_used - sent);
        if (took < 0 && command->input >= 0 && errno == EAGAIN) break;
        if (took < 0) {
            close_fd(&command->input);
            sent = command->pending_used;
            break;
        }
        sent += (size_t)took;
    }
    if (sent) {
        unsigned char frame[4], *at = frame;
        memmove(command->pending, command->pending + sent, command->pending_used - sent);
        command->pending_used -= sent;
        put_u32(&at, (uint32_t)sent);
        wire_send(GRANT, command->channel, frame, sizeof frame);
    }
    if (command->input_ends && command->pending_used == 0) close_fd(&command->input);
}

bool command_data(uint32_t channel, const unsigned char *data, size_t length) {
    struct command *command = find(channel);
    if (!command) return false;
    if (command->pending_used + length > WINDOW) die("the controller sent more than was granted");
    if (!command->pending && !(command->pending = malloc(WINDOW))) die("out of memory");
    memcpy(command->pending + command->pending_used, data, length);
    command->pending_used += length;
    write_input(command);
    return true;
}

bool command_end(uint32_t channel) {
    struct command *command = find(channel);
    if (!command) return false;
    command->input_ends = true;
    write_input(command);
    return true;
}

bool command_credit(uint32_t channel, uint32_t bytes) {
    struct command *command = find(channel);
    if (command) command->credit += bytes;
    return command != NULL;
}

static void kill_members(struct command *command) {
    members_signal(command->number, SIGKILL);
    command->kill_us = 0;
    command->killed_us = members_clock_us();
    command->dead_by_us = now_us() + DEATH_US;
}

bool command_cancel(uint32_t channel) {
    struct command *command = find(channel);
    if (!command) return false;
    command->ended |= EXIT_CANCELLED;
    kill_members(command);
    return true;
}

/* True if a streamed piece may be sent once `piece_due_us` has come. */
static bool may_stream(const struct command *command) {
    return command->credit > 0 && wire_backlog() <= OUTPUT_SOFT_LIMIT;
}

/* Returns false if there is nothing more to read for now. */
static bool read_output(struct command *command, int which) {
    struct output *output = &command->output[which];
    size_t wanted = sizeof scratch;
    if (output->left >= 0 && (size_t)output->left < wanted) wanted = (size_t)output->left;
    if (!command->cap) {
        if (!may_stream(command) || !pace_allows(command->piece_due_us)) return false;
        if ((int64_t)wanted > command->credit) wanted = (size_t)command->credit;
        if (wanted > CHUNK) wanted = CHUNK;
    }
    if (output->fd < 0 || wanted == 0) return false;
    ssize_t got = read(output->fd, scratch, wanted);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
        if (output->left > 0) output->left = 0;
        return false;
    }
    if (got <= 0) {
        close_fd(&output->fd);
        output->left = 0;
        return false;
    }
    if (output->left >= 0) output->left -= got;
    if (command->cap) {
        output_keep(output, command->cap, scratch, (size_t)got);
    } else {
        output->total += (uint64_t)got;
        command->credit -= got;
        pace_count(&command->piece_due_us, PIECE_COST_US);
        wire_send(which ? ERR : OUT, command->channel, scratch, (size_t)got);
    }
    return true;
}

static void ignore_pipe(int *fd) {
    if (*fd < 0) return;
    if (ignored_count == ignored_most) close(ignored[--ignored_count]);
    ignored[ignored_count++] = *fd;
    *fd = -1;
}

/* Stopped processes that others continue may fork faster than they are found. Then one call kills everything but the
 * agent, also processes that fork meanwhile: all have the same user, so such a command could kill the rest anyway. */
static bool is_dying(struct command *command) {
    if (!command->dead_by_us) return false;
    bool late = now_us() >= command->dead_by_us;
    enum members found = members_end(command->number, command->killed_us + BIRTH_US);
    if (found == MEMBERS_ESCAPE && (++command->escapes >= MANY_ESCAPES || late)) kill(-1, SIGKILL);
    if (found == MEMBERS_GONE || late) command->dead_by_us = 0;
    return command->dead_by_us != 0;
}

/* A command ends when its first process has ended and the output in its pipes at that moment is sent; a killed command
 * ends only when all its processes have ended too. */
static bool finish(struct command *command) {
    if (!command->exited || is_dying(command)) return false;
    for (int i = 0; i < 2; i++) {
        while (command->output[i].left != 0 && read_output(command, i)) {
        }
        if (command->output[i].fd >= 0 && command->output[i].left > 0) return false;
    }
    if (command->cap && wire_backlog() > OUTPUT_SOFT_LIMIT) { /* limits memory if many commands end together */
        held_back = true;
        return false;
    }
    if (command->cap)
        for (int i = 0; i < 2; i++) output_send(&command->output[i], command->cap, i ? ERR : OUT, command->channel);
    if (WIFSIGNALED(command->status)) send_exit(command, 128 + WTERMSIG(command->status), (uint32_t)WTERMSIG(command->status));
    else send_exit(command, WEXITSTATUS(command->status), 0);
    for (int i = 0; i < 2; i++) ignore_pipe(&command->output[i].fd);
    return true;
}

static void finish_all(void) {
    held_back = false;
    for (struct command **at = &commands; *at;) {
        struct command *command = *at;
        if (finish(command)) {
            *at = command->next;
            alive--;
            release(command);
        } else {
            at = &command->next;
        }
    }
}

void commands_reap(void) {
    int status;
    struct rusage usage;
    for (pid_t pid; (pid = wait4(-1, &status, WNOHANG, &usage)) > 0;) {
        for (struct command *at = commands; at; at = at->next) {
            if (at->pid != pid || at->exited) continue;
            at->exited = true;
            at->status = status;
            at->usage = usage;
            if (at->kill_us) kill_members(at);
            for (int i = 0; i < 2; i++) {
                int waiting = 0;
                if (at->output[i].fd >= 0) ioctl(at->output[i].fd, FIONREAD, &waiting);
                at->output[i].left = waiting;
            }
            break;
        }
    }
    finish_all();
}

/* Answers when every process but the agent is dead. The agent is process 1 and starts no process for this, so it works
 * with a full process table or a replaced shell. */
void commands_kill_all(uint32_t channel) {
    int64_t give_up = now_us() + KILL_ALL_US;
    if (getpid() != 1) {
        send_error(channel, EPERM, "kill all");
        return;
    }
    while (kill(-1, SIGKILL) == 0) {
        if (now_us() >= give_up) {
            send_error(channel, EBUSY, "kill all");
            return;
        }
        commands_reap();
        usleep(1000);
    }
    commands_reap();
    send_done(channel);
}

static void time_out(struct command *command, int64_t now) {
    command->ended |= EXIT_TIMED_OUT;
    command->deadline_us = 0;
    if (command->grace_us == 0) {
        kill_members(command);
        return;
    }
    members_signal(command->number, SIGTERM);
    command->kill_us = now + command->grace_us;
}

void commands_tick(void) {
    int64_t now = now_us();
    for (struct command *at = commands; at; at = at->next) {
        if (at->exited) continue;
        if (at->deadline_us && now >= at->deadline_us) time_out(at, now);
        else if (at->kill_us && now >= at->kill_us) kill_members(at);
    }
    finish_all();
}

/* Returns the earlier of two times, of which 0 is none. */
static int64_t earlier(int64_t one, int64_t other) { return !one || (other && other < one) ? other : one; }

int64_t commands_deadline(void) {
    int64_t nearest = 0;
    for (struct command *at = commands; at; at = at->next) {
        int64_t piece_due = !at->cap && may_stream(at) && !pace_allows(at->piece_due_us) ? at->piece_due_us : 0;
        nearest = earlier(nearest, piece_due);
        if (at->exited && !at->dead_by_us) continue;
        nearest = earlier(nearest, at->exited ? now_us() + DEATH_POLL_US : at->kill_us ? at->kill_us : at->deadline_us);
    }
    return nearest;
}

size_t commands_poll(struct pollfd *entries, size_t capacity) {
    size_t count = 0;
    for (struct command *at = commands; at && count + 3 <= capacity; at = at->next) {
        bool may_read = at->cap || (may_stream(at) && pace_allows(at->piece_due_us));
        for (int i = 0; i < 2 && may_read; i++)
            if (at->output[i].fd >= 0) entries[count++] = (struct pollfd){at->output[i].fd, POLLIN, 0};
        if (at->input >= 0 && at->pending_used) entries[count++] = (struct pollfd){at->input, POLLOUT, 0};
    }
    for (size_t i = 0; i < ignored_count && count < capacity; i++) entries[count++] = (struct pollfd){ignored[i], POLLIN, 0};
    return count;
}

static void throw_away(int fd) {
    for (size_t i = 0; i < ignored_count; i++) {
        if (ignored[i] != fd) continue;
        ssize_t got = read(fd, scratch, sizeof scratch);
        if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) {
            close(fd);
            ignored[i] = ignored[--ignored_count];
        }
        return;
    }
}

void commands_ready(const struct pollfd *entries, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (!entries[i].revents) continue;
        bool found = false;
        for (struct command *at = commands; at && !found; at = at->next) {
            if (at->input == entries[i].fd) {
                write_input(at);
                found = true;
            }
            for (int which = 0; which < 2 && !found; which++) {
                if (at->output[which].fd != entries[i].fd) continue;
                for (int turn = 0; turn < 8 && read_output(at, which); turn++) {
                }
                found = true;
            }
        }
        if (!found) throw_away(entries[i].fd);
    }
}
