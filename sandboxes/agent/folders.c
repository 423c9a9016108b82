/* Directory trees: lists and removes them, prints and restores the modes of folders; never follows a symbolic link. */
#include "agent.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    DEEPEST = 200,
    MAX_LISTING = 1 << 24, /* maximum bytes of one listing, as in the controller (frames.py) */
};

struct walk {
    uint32_t channel;
    uint64_t count, limit;
    size_t sent;
    char path[4096];
    int error;
};

/* ENTRY: u32 mode, u64 size, u32 length and path (relative), u32 length and link target. */
static void send_entry(struct walk *walk, int folder, const char *name, const struct stat *status, size_t prefix) {
    unsigned char frame[32 + 4096 + 4096], *at = frame;
    char target[4096];
    ssize_t length = S_ISLNK(status->st_mode) ? readlinkat(folder, name, target, sizeof target) : 0;
    if (length < 0) length = 0;
    const char *path = walk->path + prefix;
    put_u32(&at, status->st_mode);
    put_u64(&at, (uint64_t)status->st_size);
    put_u32(&at, (uint32_t)strlen(path));
    memcpy(at, path, strlen(path));
    at += strlen(path);
    put_u32(&at, (uint32_t)length);
    memcpy(at, target, (size_t)length);
    at += length;
    walk->sent += (size_t)(at - frame);
    if (walk->sent > MAX_LISTING) walk->error = E2BIG;
    else wire_send(ENTRY, walk->channel, frame, (size_t)(at - frame));
}

static void visit(struct walk *walk, int folder, size_t prefix, int depth);

/* No error if the folder has been removed since it was seen. */
static void enter(struct walk *walk, int parent, const char *name, size_t prefix, int depth) {
    int inner = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (inner >= 0 && depth <= DEEPEST) {
        visit(walk, inner, prefix, depth);
        return;
    }
    if (inner < 0 && errno != ENOENT && errno != ENOTDIR) walk->error = errno;
    if (inner < 0) return;
    walk->error = ELOOP;
    close(inner);
}

static void visit(struct walk *walk, int folder, size_t prefix, int depth) {
    DIR *directory = fdopendir(folder);
    if (!directory) {
        walk->error = errno;
        close(folder);
        return;
    }
    size_t end = strlen(walk->path);
    for (struct dirent *entry; !walk->error && (entry = readdir(directory));) {
        struct stat status;
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        if (end + strlen(entry->d_name) + 2 > sizeof walk->path) walk->error = ENAMETOOLONG;
        else if (++walk->count > walk->limit) walk->error = E2BIG;
        if (walk->error) break;
        snprintf(walk->path + end, sizeof walk->path - end, end > prefix ? "/%s" : "%s", entry->d_name);
        if (fstatat(dirfd(directory), entry->d_name, &status, AT_SYMLINK_NOFOLLOW) == 0) {
            send_entry(walk, dirfd(directory), entry->d_name, &status, prefix);
            if (!walk->error && S_ISDIR(status.st_mode)) enter(walk, dirfd(directory), entry->d_name, prefix, depth + 1);
        }
        walk->path[end] = 0;
    }
    closedir(directory);
}

void folder_list(uint32_t channel, struct reader *payload) {
    struct walk *walk = calloc(1, sizeof *walk);
    if (!walk) die("out of memory");
    walk->channel = channel;
    walk->limit = take_u64(payload);
    char *path = take_string(payload);
    if (payload->bad) die("the controller sent a malformed request");
    int folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0) walk->error = errno;
    else visit(walk, folder, 0, 0);
    if (walk->error) send_error(channel, walk->error, path);
    else send_done(channel);
    free(path);
    free(walk);
}

static int remove_at(int parent, const char *name, int depth) {
    if (unlinkat(parent, name, 0) == 0 || errno == ENOENT) return 0;
    if (errno != EISDIR && errno != EPERM && errno != ENOTEMPTY) return errno;
    if (depth > DEEPEST) return ELOOP;
    int folder = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (folder < 0 && errno == EACCES && fchmodat(parent, name, 0700, 0) == 0)
        folder = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (folder < 0) return errno == ENOENT ? 0 : errno;
    fchmod(folder, 0700); /* folders of a package may be read-only, as those of Go's are */
    DIR *directory = fdopendir(folder);
    int error = directory ? 0 : errno;
    if (!directory) {
        close(folder);
        return error;
    }
    for (struct dirent *entry; !error && (entry = readdir(directory));)
        if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, "..")) error = remove_at(folder, entry->d_name, depth + 1);
    closedir(directory);
    if (!error && unlinkat(parent, name, AT_REMOVEDIR) < 0 && errno != ENOENT) error = errno;
    return error;
}

/* Removes a path, or only the directory's content if the path ends in a slash. */
void folder_remove(uint32_t channel, struct reader *payload) {
    char *path = take_string(payload);
    if (payload->bad) die("the controller sent a malformed request");
    size_t length = strlen(path);
    int error = 0;
    if (length && path[length - 1] == '/') {
        int folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        DIR *directory = folder < 0 ? NULL : fdopendir(folder);
        if (!directory) error = errno;
        for (struct dirent *entry; directory && !error && (entry = readdir(directory));)
            if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, "..")) error = remove_at(folder, entry->d_name, 0);
        if (directory) closedir(directory);
        else if (folder >= 0) close(folder);
    } else {
        error = remove_at(AT_FDCWD, path, 0);
    }
    if (error) send_error(channel, error, path);
    else send_done(channel);
    free(path);
}

static long flags_of(int fd) {
    int flags = 0;
    return ioctl(fd, FS_IOC_GETFLAGS, &flags) < 0 ? -1 : flags;
}

static int open_folder(const char *path) { return open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC); }

static void restore(const char *path, mode_t mode, int flags) {
    if (chmod(path, mode | 0700) == 0) { /* else it is owned by another user, so code inside cannot have changed it */
        int fd = open_folder(path);
        if (fd >= 0 && flags >= 0 && flags_of(fd) != flags) ioctl(fd, FS_IOC_SETFLAGS, &flags);
        if (fd >= 0) close(fd);
        chmod(path, mode);
    }
    utimensat(AT_FDCWD, path, NULL, 0); /* whoever may write to it may do this */
}

static void touch_members(const char *path) {
    DIR *directory = opendir(path);
    for (struct dirent *entry; directory && (entry = readdir(directory));)
        utimensat(dirfd(directory), entry->d_name, NULL, AT_SYMLINK_NOFOLLOW);
    if (directory) closedir(directory);
}

static void describe(const char *path) {
    struct stat status;
    int fd = open_folder(path);
    if (lstat(path, &status) < 0 || (fd < 0 && S_ISDIR(status.st_mode))) printf("%s\n", strerror(errno));
    else printf("%o %ld %u:%u\n", status.st_mode & 07777, flags_of(fd), status.st_uid, status.st_gid);
    if (fd >= 0) close(fd);
}

/* `agent --folders [--restore MODE FLAGS PATH] ... [--touch PATH] ... PATH ...`: prints a line for each PATH, a folder
 * that a sandbox may write to or a device that its user may own: mode, inode flags, owner (confine.c allows no extended
 * attributes). `--restore` restores mode and flags, and sets the times to now. `--touch` sets the times of what is in a
 * folder to now, where code inside may do that too. The caller compares the lines to detect a failed restore. */
int folders(int count, char **words) {
    for (int i = 0; i < count; i++) {
        if (!strcmp(words[i], "--restore") && i + 3 < count) {
            restore(words[i + 3], (mode_t)strtol(words[i + 1], NULL, 8), atoi(words[i + 2]));
            i += 3;
        } else if (!strcmp(words[i], "--touch") && i + 1 < count) {
            touch_members(words[++i]);
        } else {
            describe(words[i]);
        }
    }
    return fflush(stdout) ? 1 : 0;
}
