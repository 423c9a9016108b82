/* The resident agent: runs commands and moves files for a controller that exchanges frames on stdin and stdout.
 *
 * Frame: u8 type, u32 channel, u32 length (little endian), then `length` bytes. The controller names the channels.
 * The agent is process 1 of its sandbox: code inside can neither signal nor trace it. It ends at end-of-file on stdin,
 * and the kernel then ends all other processes. See docs/sandboxes.md for the protocol.
 */
#ifndef ROLL_FLASH_AGENT_H
#define ROLL_FLASH_AGENT_H

#include <poll.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum {
    PROTOCOL_VERSION = 1,
    HEADER_BYTES = 9,
    MAX_PAYLOAD = 1 << 20,
    CHUNK = 1 << 16,
    WINDOW = 1 << 18,
    MAX_CHANNELS = 256,
    MAX_CAP = 1 << 24,
    OUTPUT_SOFT_LIMIT = 1 << 20,
    OUTPUT_HARD_LIMIT = 1 << 26,
};

/* Controller to agent. */
enum { EXEC = 1, DATA, END, CANCEL, CREDIT, READ, WRITE, PING, LIST, MKDIR, SYMLINK, REMOVE, KILL_ALL, PAUSE, RESUME };
/* Agent to controller. */
enum { READY = 64, OUT, ERR, EXIT, DONE, ERROR, GRANT, ENTRY };

enum { EXEC_STDIN = 1, EXEC_MERGE = 2 };
enum { EXIT_TIMED_OUT = 1, EXIT_CANCELLED = 2, EXIT_NOT_STARTED = 4, EXIT_BUSY = 8 };

struct reader {
    const unsigned char *at;
    size_t left;
    bool bad;
};

/* wire.c: frames in, frames out, both without blocking. */
void wire_start(void);
void wire_read(void);
bool wire_waits(void);
bool wire_next(uint8_t *type, uint32_t *channel, struct reader *payload);
void wire_send(uint8_t type, uint32_t channel, const void *data, size_t length);
void wire_flush(void);
size_t wire_backlog(void);
uint32_t take_u32(struct reader *reader);
uint64_t take_u64(struct reader *reader);
char *take_string(struct reader *reader);
void put_u32(unsigned char **at, uint32_t value);
void put_u64(unsigned char **at, uint64_t value);
void send_error(uint32_t channel, int error, const char *what);
void send_done(uint32_t channel);
void die(const char *what) __attribute__((noreturn));
int64_t now_us(void);
bool pace_allows(int64_t due_us);
void pace_count(int64_t *due_us, int64_t cost_us);

/* command.c: the running commands. */
void commands_prepare(void);
void command_start(uint32_t channel, struct reader *payload);
bool command_data(uint32_t channel, const unsigned char *data, size_t length);
bool command_end(uint32_t channel);
bool command_credit(uint32_t channel, uint32_t bytes);
bool command_cancel(uint32_t channel);
void commands_kill_all(uint32_t channel);
void commands_reap(void);
void commands_tick(void);
size_t commands_poll(struct pollfd *entries, size_t capacity);
void commands_ready(const struct pollfd *entries, size_t count);
int64_t commands_deadline(void);
bool commands_wait(void);

/* output.c: one output pipe. With a cap, the first and the last bytes are kept here and sent at the end; without a cap,
 * bytes are sent at once, within the controller's credit. */
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

/* spawn.c: one command to start. */
struct request {
    uint32_t timeout_ms, grace_ms, cap, window, flags;
    char *directory, **words, **settings;
};

bool request_take(struct request *request, struct reader *payload);
void request_free(struct request *request);
pid_t spawn(const struct request *request, const int fds[3], uint64_t number, int *error);

/* members.c: the processes of each command. */
void members_prepare(void);
int members_open(const char *path, int flags);
bool members_mark(uint64_t command);
bool members_is_stopped(pid_t pid);
void members_signal(uint64_t command, int number);
int64_t members_clock_us(void);
/* Rest of a killed command: nothing, dying processes, or processes that started after `since_us`. */
enum members { MEMBERS_GONE, MEMBERS_DIE, MEMBERS_ESCAPE };
enum members members_end(uint64_t command, int64_t since_us);
bool members_pause(bool pause);
bool members_exist(void);
void members_limit_kernel_memory(void);

/* files.c: regular files only, as the sandbox's user. */
void file_read(uint32_t channel, struct reader *payload);
void file_write(uint32_t channel, struct reader *payload);
bool file_data(uint32_t channel, const unsigned char *data, size_t length);
bool file_end(uint32_t channel);
bool file_credit(uint32_t channel, uint32_t bytes);
bool file_cancel(uint32_t channel);
void files_pump(void);
bool files_waiting(void);
void file_mkdir(uint32_t channel, struct reader *payload);
void file_symlink(uint32_t channel, struct reader *payload);

/* folders.c: list and remove directory trees; print and restore the modes, flags and attributes of folders. */
void folder_list(uint32_t channel, struct reader *payload);
void folder_remove(uint32_t channel, struct reader *payload);
int folders(int count, char **words);

/* relay.c: connections on the loopback address as channels. */
void relay(uint16_t port) __attribute__((noreturn));

/* root.c: a writable root in memory. */
void root_enter(char **words, size_t count);
void root_keep(uint64_t limit);
void root_pause(uint32_t channel);
void root_resume(uint32_t channel);

/* confine.c: the system call filter. */
void confine(void);

#endif
