/* `agent --folders [--restore MODE FLAGS PATH] ... PATH ...`: prints a line for each PATH, a folder that a sandbox may
 * write to: mode, inode flags, owner, extended attributes (such as access lists). `--restore` restores mode and flags,
 * removes the attributes and sets the times to now. The caller compares the lines to detect a failed restore. */
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

enum { NAMES = 1 << 16 };

static char names[NAMES];

static ssize_t attributes(int fd) {
    ssize_t length = flistxattr(fd, names, sizeof names);
    return length < 0 && errno == ENOTSUP ? 0 : length;
}

static void remove_attributes(int fd) {
    ssize_t length = attributes(fd);
    for (char *name = names; name < names + length; name += strlen(name) + 1) fremovexattr(fd, name);
}

static long flags_of(int fd) {
    int flags = 0;
    return ioctl(fd, FS_IOC_GETFLAGS, &flags) < 0 ? -1 : flags;
}

static int open_folder(const char *path) { return open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC); }

static void restore(const char *path, mode_t mode, int flags) {
    if (chmod(path, mode | 0700) < 0) return; /* owned by another user, so code inside cannot have changed it */
    int fd = open_folder(path);
    if (fd < 0) return;
    remove_attributes(fd);
    if (flags >= 0 && flags_of(fd) != flags) ioctl(fd, FS_IOC_SETFLAGS, &flags);
    fchmod(fd, mode);
    futimens(fd, NULL);
    close(fd);
}

static void describe(const char *path) {
    struct stat status;
    int fd = open_folder(path);
    if (fd < 0 || fstat(fd, &status) < 0) {
        printf("%s\n", strerror(errno));
        if (fd >= 0) close(fd);
        return;
    }
    printf("%o %ld %u:%u", status.st_mode & 07777, flags_of(fd), status.st_uid, status.st_gid);
    ssize_t length = attributes(fd);
    if (length < 0) printf(" attributes: %s", strerror(errno));
    for (char *name = names; name < names + length; name += strlen(name) + 1) printf(" %s", name);
    printf("\n");
    close(fd);
}

int folders(int count, char **words) {
    for (int i = 0; i < count; i++) {
        if (!strcmp(words[i], "--restore") && i + 3 < count) {
            restore(words[i + 3], (mode_t)strtol(words[i + 1], NULL, 8), atoi(words[i + 2]));
            i += 3;
        } else {
            describe(words[i]);
        }
    }
    return fflush(stdout) ? 1 : 0;
}
