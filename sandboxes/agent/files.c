/* File operations as the sandbox's user. Only regular files are read; writes are atomic. */
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

enum { PROC_MAGIC = 0x9fa0, SYSFS_MAGIC = 0x62656572, NAME_TRIES = 8 };

struct transfer {
    uint32_t channel;
    int fd;
    bool writing;
    int64_t credit;
    uint64_t moved, limit;
    char *path, *temporary;
    struct transfer *next;
};

static struct transfer *transfers;
static uint32_t transfer_count;

static struct transfer *find(uint32_t channel, bool writing) {
    for (struct transfer *at = transfers; at; at = at->next)
        if (at->channel == channel && at->writing == writing) return at;
    return NULL;
}

static void drop(struct transfer *transfer) {
    for (struct transfer **at = &transfers; *at; at = &(*at)->next)
        if (*at == transfer) {
            *at = transfer->next;
            transfer_count--;
            break;
        }
    if (transfer->fd >= 0) close(transfer->fd);
    if (transfer->temporary) unlink(transfer->temporary);
    free(transfer->temporary);
    free(transfer->path);
    free(transfer);
}

static struct transfer *begin(uint32_t channel, bool writing, char *path) {
    struct transfer *transfer = calloc(1, sizeof *transfer);
    if (!transfer) die("out of memory");
    *transfer = (struct transfer){.channel = channel, .writing = writing, .path = path, .fd = -1, .next = transfers};
    transfers = transfer;
    transfer_count++;
    return transfer;
}

static void fail(struct transfer *transfer, int error) {
    send_error(transfer->channel, error, transfer->path);
    drop(transfer);
}

/* Refuses files of the kernel (/proc, /sys): they contain data of the process that reads them, the agent. */
static int open_regular(const char *path) {
    struct stat status;
    struct statfs system;
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (fd < 0) return -1;
    int error = 0;
    if (fstat(fd, &status) < 0 || fstatfs(fd, &system) < 0) error = errno;
    else if (S_ISDIR(status.st_mode)) error = EISDIR;
    else if (!S_ISREG(status.st_mode) || system.f_type == PROC_MAGIC || system.f_type == SYSFS_MAGIC) error = EINVAL;
    if (!error) return fd;
    close(fd);
    errno = error;
    return -1;
}

void file_read(uint32_t channel, struct reader *payload) {
    uint32_t window = take_u32(payload);
    uint64_t limit = take_u64(payload);
    char *path = take_string(payload);
    if (payload->bad) die("the controller sent a malformed request");
    struct transfer *transfer = begin(channel, false, path);
    transfer->credit = window;
    transfer->limit = limit;
    if (transfer_count > MAX_CHANNELS) {
        fail(transfer, EMFILE);
        return;
    }
    transfer->fd = open_regular(path);
    if (transfer->fd < 0) fail(transfer, errno);
    else files_pump();
}

static bool pump(struct transfer *transfer) {
    static unsigned char scratch[CHUNK];
    size_t wanted = transfer->credit < CHUNK ? (size_t)transfer->credit : CHUNK;
    ssize_t got = read(transfer->fd, scratch, wanted);
    if (got < 0) {
        fail(transfer, errno);
        return false;
    }
    if (got == 0) {
        send_done(transfer->channel);
        drop(transfer);
        return false;
    }
    transfer->moved += (uint64_t)got;
    transfer->credit -= got;
    if (transfer->moved > transfer->limit) {
        fail(transfer, EFBIG);
        return false;
    }
    wire_send(OUT, transfer->channel, scratch, (size_t)got);
    return true;
}

bool files_waiting(void) {
    for (struct transfer *at = transfers; at; at = at->next)
        if (!at->writing && at->credit > 0 && wire_backlog() <= OUTPUT_SOFT_LIMIT) return true;
    return false;
}

void files_pump(void) {
    for (struct transfer *at = transfers, *next; at; at = next) {
        next = at->next;
        if (!at->writing && at->credit > 0 && wire_backlog() <= OUTPUT_SOFT_LIMIT) pump(at);
    }
}

static int make_parents(char *path) {
    struct stat status;
    char *last = strrchr(path, '/');
    if (last && last != path) { /* usually the folder is there: 200 calls for a deep one would each walk down to it */
        *last = 0;
        bool is_there = stat(path, &status) == 0;
        *last = '/';
        if (is_there) return 0;
    }
    for (char *at = strchr(path + 1, '/'); at; at = strchr(at + 1, '/')) {
        *at = 0;
        int failed = mkdir(path, 0755);
        int error = errno;
        *at = '/';
        if (failed && error != EEXIST && error != EROFS && error != EACCES) return error;
    }
    return 0;
}

/* Creates a temporary file next to the target with an unpredictable name: commands can write to the same folder. */
static int open_beside(struct transfer *transfer) {
    char *slash = strrchr(transfer->path, '/');
    size_t folder = slash ? (size_t)(slash - transfer->path) + 1 : 0, size = folder + 48;
    if (!(transfer->temporary = malloc(size))) die("out of memory");
    int error = EEXIST;
    for (int i = 0; i < NAME_TRIES && error == EEXIST; i++) {
        uint64_t word[2];
        if (getrandom(word, sizeof word, 0) != sizeof word) die("no random numbers can be had");
        snprintf(transfer->temporary, size, "%.*s.roll-flash-%016llx%016llx~", (int)folder, transfer->path,
                 (unsigned long long)word[0], (unsigned long long)word[1]);
        transfer->fd = open(transfer->temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
        error = transfer->fd < 0 ? errno : 0;
    }
    if (!error) return 0;
    free(transfer->temporary);
    transfer->temporary = NULL;
    return error;
}

static int open_temporary(struct transfer *transfer, uint32_t mode) {
    struct stat status;
    if (lstat(transfer->path, &status) == 0 && !S_ISREG(status.st_mode) && !S_ISLNK(status.st_mode))
        return S_ISDIR(status.st_mode) ? EISDIR : EINVAL;
    int error = make_parents(transfer->path);
    if (!error) error = open_beside(transfer);
    if (!error && fchmod(transfer->fd, mode & 0777) < 0) error = errno;
    return error;
}

void file_write(uint32_t channel, struct reader *payload) {
    uint32_t mode = take_u32(payload);
    char *path = take_string(payload);
    if (payload->bad) die("the controller sent a malformed request");
    struct transfer *transfer = begin(channel, true, path);
    int error = transfer_count > MAX_CHANNELS ? EMFILE : open_temporary(transfer, mode);
    if (error) fail(transfer, error);
}

bool file_data(uint32_t channel, const unsigned char *data, size_t length) {
    struct transfer *transfer = find(channel, true);
    if (!transfer) return false;
    unsigned char frame[4], *at = frame;
    put_u32(&at, (uint32_t)length);
    while (length) {
        ssize_t took = write(transfer->fd, data, length);
        if (took < 0 && errno == EINTR) continue;
        if (took < 0) {
            fail(transfer, errno);
            return true;
        }
        data += took;
        length -= (size_t)took;
    }
    wire_send(GRANT, channel, frame, sizeof frame);
    return true;
}

bool file_end(uint32_t channel) {
    struct transfer *transfer = find(channel, true);
    if (!transfer) return false;
    if (rename(transfer->temporary, transfer->path) < 0) {
        fail(transfer, errno);
        return true;
    }
    free(transfer->temporary);
    transfer->temporary = NULL;
    send_done(channel);
    drop(transfer);
    return true;
}

bool file_credit(uint32_t channel, uint32_t bytes) {
    struct transfer *transfer = find(channel, false);
    if (transfer) transfer->credit += bytes;
    return transfer != NULL;
}

bool file_cancel(uint32_t channel) {
    struct transfer *transfer = find(channel, false);
    if (!transfer) transfer = find(channel, true);
    if (!transfer) return false;
    fail(transfer, ECANCELED);
    return true;
}

void file_mkdir(uint32_t channel, struct reader *payload) {
    uint32_t mode = take_u32(payload);
    char *path = take_string(payload);
    if (payload->bad) die("the controller sent a malformed request");
    struct stat status;
    int error = make_parents(path);
    if (!error && mkdir(path, mode & 0777) < 0) error = errno;
    if (error == EEXIST && lstat(path, &status) == 0 && S_ISDIR(status.st_mode)) error = 0;
    if (error) send_error(channel, error, path);
    else send_done(channel);
    free(path);
}

void file_symlink(uint32_t channel, struct reader *payload) {
    char *target = take_string(payload), *path = take_string(payload);
    if (payload->bad) die("the controller sent a malformed request");
    int error = make_parents(path);
    if (!error && symlink(target, path) < 0) error = errno;
    if (error) send_error(channel, error, path);
    else send_done(channel);
    free(target);
    free(path);
}
