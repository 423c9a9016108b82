/* A writable root in memory. On most disks Docker cannot limit the data that a container writes to its root. So that
 * root stays read-only and the agent, before it runs anything, mounts an overlay over it whose changes are in a tmpfs
 * of the spec's size. For that it starts as root with a few capabilities; it drops all of them here. */
#include "agent.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

#define LAYER "/.roll-flash-root" /* the tmpfs: changes, work, merged, image; in the new root, image is the old root */
#define MERGED LAYER "/merged"
#define CHANGES LAYER "/changes"
#define IMAGE LAYER "/image"
#define SELF "/proc/1"
#define REMOVED ".wh." /* a name in a layer of an image that begins so is a mark: what the rest of it names is removed */
#define OPAQUE "trusted.overlay.opaque" /* code inside may neither read nor set it */

enum { OVERLAY = 0x794c7630 }; /* linux/magic.h */
enum { OPENAT2 = 437, NO_OTHER_MOUNT = 0x01, NO_LINK_OF_PROC = 0x02 }; /* linux/openat2.h (Linux 5.6) */
enum { MAX_MOUNTS = 256, PATH_SIZE = 4096, DEEPEST = 200, MOST_TRIES = 3, BLOCK = 4096 };
enum { ROOM = 8 << 20, ROOM_US = 1000000 }; /* memory in the sandbox for the engine's program, which took less than 3 MB */

static void must(bool done, const char *what) {
    if (done) return;
    char text[PATH_SIZE + 256];
    snprintf(text, sizeof text, "the writable root: %s: %s", what, strerror(errno));
    die(text);
}

static bool is_below(const char *path, const char *folder) {
    size_t length = strlen(folder);
    return strncmp(path, folder, length) == 0 && (path[length] == 0 || path[length] == '/');
}

/* Decodes octal escapes such as \040 in /proc/self/mountinfo. */
static void unescape(char *path) {
    char *to = path;
    for (char *at = path; *at; at++) {
        unsigned int code;
        if (*at == '\\' && sscanf(at + 1, "%3o", &code) == 1) {
            *to++ = (char)code;
            at += 3;
        } else {
            *to++ = *at;
        }
    }
    *to = 0;
}

/* Lists the outermost mount points; a recursive bind mount of each includes the mounts below it. */
static size_t read_mounts(char **found) {
    FILE *table = fopen("/proc/self/mountinfo", "re");
    char line[2 * PATH_SIZE], path[PATH_SIZE];
    size_t count = 0;
    must(table != NULL, "/proc/self/mountinfo");
    while (fgets(line, sizeof line, table)) {
        if (sscanf(line, "%*s %*s %*s %*s %4095s", path) != 1) continue;
        unescape(path);
        bool known = !strcmp(path, "/") || is_below(path, LAYER);
        for (size_t i = 0; i < count; i++) known |= is_below(path, found[i]);
        if (known) continue;
        must(count < MAX_MOUNTS, "too many mounts");
        must((found[count++] = strdup(path)) != NULL, "out of memory");
    }
    fclose(table);
    return count;
}

/* Copies a file such as /etc/hosts, which the engine keeps on its disk, into the new root. */
static void copy_file(const char *from, const char *to) {
    char block[4096];
    int in = open(from, O_RDONLY | O_CLOEXEC), out = open(to, O_WRONLY | O_TRUNC | O_CLOEXEC);
    must(in >= 0 && out >= 0, from);
    for (ssize_t got; (got = read(in, block, sizeof block)) > 0;) must(write(out, block, (size_t)got) == got, to);
    close(in);
    close(out);
}

static bool is_named(const char *path, char **names, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (!strcmp(path, names[i])) return true;
    return false;
}

/* `volumes`: where the engine mounted something because the image declares it; the root already has these paths. */
static void carry_over(const char *path, char **volumes, size_t volume_count) {
    struct stat status;
    char target[2 * PATH_SIZE];
    if (is_named(path, volumes, volume_count)) return;
    snprintf(target, sizeof target, MERGED "%s", path);
    must(stat(path, &status) == 0, path);
    if (S_ISREG(status.st_mode)) copy_file(path, target);
    else must(mount(path, target, NULL, MS_BIND | MS_REC, NULL) == 0, path);
}

/* Returns the place that a path leads to, where the engine mounted a volume whose path goes through a link. */
static char *place_of(char *path) {
    char *place = realpath(path, NULL);
    return place ? place : path;
}

static void bind_read_only(const char *from, const char *to) {
    must(mount(from, to, NULL, MS_BIND, NULL) == 0, to);
    must(mount(NULL, to, NULL, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV, NULL) == 0, to);
}

static void drop_privileges(uid_t user, gid_t group) {
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct none[2] = {{0, 0, 0}, {0, 0, 0}};
    for (int capability = 0; capability < 64; capability++)
        must(prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0 || errno == EINVAL, "dropping capabilities");
    must(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, "no_new_privs");
    must(setgroups(0, NULL) == 0 && setresgid(group, group, group) == 0 && setresuid(user, user, user) == 0, "user");
    must(syscall(SYS_capset, &header, none) == 0, "dropping capabilities");
}

/* Without a network the engine writes no /etc/hosts, and programs would not find their own servers by name. In a fork
 * the path may be anything that code inside has made of it. */
static void name_localhost(void) {
    static const char names[] = "127.0.0.1 localhost sandbox\n";
    struct stat status;
    int fd = open("/etc/hosts", O_WRONLY | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0644);
    if (fd < 0) return;
    if (fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && status.st_size == 0)
        must(write(fd, names, sizeof names - 1) == sizeof names - 1, "/etc/hosts");
    close(fd);
}

/* `words`: user, group, then the image's volumes. */
void root_enter(char **words, size_t count) {
    char *mounts[MAX_MOUNTS], directory[PATH_SIZE];
    must(count >= 2 && getcwd(directory, sizeof directory), "its settings");
    umask(022);
    must(mkdir(CHANGES, 0755) == 0 && mkdir(LAYER "/work", 0700) == 0 && mkdir(MERGED, 0755) == 0 && mkdir(IMAGE, 0755) == 0, LAYER);
    must(mount("overlay", MERGED, "overlay", MS_NOSUID | MS_NODEV, "lowerdir=/,upperdir=" CHANGES ",workdir=" LAYER "/work") == 0, "overlay");
    size_t mount_count = read_mounts(mounts);
    for (size_t i = 2; i < count; i++) words[i] = place_of(words[i]);
    for (size_t i = 0; i < mount_count; i++) {
        carry_over(mounts[i], words + 2, count - 2);
        free(mounts[i]);
    }
    bind_read_only(LAYER, MERGED LAYER);
    bind_read_only("/", MERGED IMAGE);
    must(chdir(MERGED) == 0 && mount(".", "/", NULL, MS_MOVE, NULL) == 0 && chroot(".") == 0, "entering it");
    name_localhost();
    bind_read_only(SELF, SELF); /* root can write there without a capability, for example to oom_score_adj */
    drop_privileges((uid_t)strtoul(words[0], NULL, 10), (gid_t)strtoul(words[1], NULL, 10));
    must(chdir(directory) == 0, directory);
}

/* The code below runs in a separate process, with the initial capabilities of the agent, on files written by untrusted
 * code: it follows no links, and copies at most `budget` bytes even if files change meanwhile. An empty file takes a
 * disk's room too, a folder a block of it: so `entries` are limited to as many as there are blocks in the budget. */
static uint64_t budget, entries;

/* Mount points of the engine (/etc/hosts, a volume) and the folders above them are not removed. */
static void remove_entry(int folder, const char *name, int depth) {
    if (unlinkat(folder, name, 0) == 0 || errno == ENOENT || errno == EBUSY) return;
    must(errno == EISDIR && depth < DEEPEST, name);
    int inner = openat(folder, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *directory = inner < 0 ? NULL : fdopendir(inner);
    must(directory != NULL, name);
    for (struct dirent *entry; (entry = readdir(directory));)
        if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, "..")) remove_entry(inner, entry->d_name, depth + 1);
    closedir(directory);
    must(unlinkat(folder, name, AT_REMOVEDIR) == 0 || errno == EBUSY || errno == ENOTEMPTY, name);
}

/* Holes count against the budget: the engine writes them out. */
static void copy_data(int in, int out, const char *name) {
    char block[CHUNK];
    for (ssize_t got; (got = read(in, block, sizeof block)) > 0; budget -= (uint64_t)got)
        must((uint64_t)got <= budget && write(out, block, (size_t)got) == got, name);
}

static void set_owner(int fd, const struct stat *status, const char *name) {
    const struct timespec times[2] = {status->st_atim, status->st_mtim};
    must(fchown(fd, status->st_uid, status->st_gid) == 0 && fchmod(fd, status->st_mode & 07777) == 0 && futimens(fd, times) == 0, name);
}

static void keep_file(int from, int to, const char *name, const struct stat *status) {
    errno = EFBIG;
    must((uint64_t)status->st_size <= budget, name);
    remove_entry(to, name, 0);
    int in = openat(from, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    int out = openat(to, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (out < 0 && errno == EEXIST) {
        close(in);
        return;
    }
    must(in >= 0 && out >= 0, name);
    copy_data(in, out, name);
    set_owner(out, status, name);
    close(in);
    close(out);
}

static void keep_link(int from, int to, const char *name, const struct stat *status) {
    char target[PATH_SIZE];
    ssize_t length = readlinkat(from, name, target, sizeof target - 1);
    must(length > 0, name);
    target[length] = 0;
    remove_entry(to, name, 0);
    must(symlinkat(target, to, name) == 0 && fchownat(to, name, status->st_uid, status->st_gid, AT_SYMLINK_NOFOLLOW) == 0, name);
}

static void keep_folder(int from, int to, int depth);

/* The overlay does not know that a folder it made has one below it after this: what is removed there leaves no mark.
 * So the folder is marked as one that covers what is below, before there is something: for the overlay, which looks
 * again when the kernel has forgotten the folder, and for the next time here. In a user namespace nobody may
 * set this (EPERM). */
static void keep_entry(int from, int to, const char *name, int depth) {
    struct stat status, there;
    char opaque = 0;
    if (fstatat(from, name, &status, AT_SYMLINK_NOFOLLOW) < 0) return;
    /* All else is the overlay's mark of a removal, or what no snapshot has: it also hides what the image has there. */
    bool is_kept = S_ISREG(status.st_mode) || S_ISLNK(status.st_mode) || S_ISDIR(status.st_mode);
    errno = EDQUOT;
    must(!is_kept || entries-- > 0, name);
    errno = EINVAL;
    must(!is_kept || strncmp(name, REMOVED, strlen(REMOVED)) != 0, name);
    if (!is_kept) remove_entry(to, name, 0);
    else if (S_ISREG(status.st_mode)) keep_file(from, to, name, &status);
    else if (S_ISLNK(status.st_mode)) keep_link(from, to, name, &status);
    if (!S_ISDIR(status.st_mode)) return;
    int source = openat(from, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    must(source >= 0 && depth < DEEPEST, name);
    bool covers = fgetxattr(source, OPAQUE, &opaque, 1) == 1 && opaque == 'y';
    bool is_folder = fstatat(to, name, &there, AT_SYMLINK_NOFOLLOW) == 0 && S_ISDIR(there.st_mode);
    if (!covers && !is_folder) must(fsetxattr(source, OPAQUE, "y", 1, 0) == 0 || errno == EPERM, name);
    if (covers || !is_folder) remove_entry(to, name, 0);
    must(mkdirat(to, name, 0700) == 0 || errno == EEXIST, name);
    int target = openat(to, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    must(target >= 0, name);
    keep_folder(source, target, depth + 1);
    set_owner(target, &status, name);
    close(target);
}

/* Closes `from`. */
static void keep_folder(int from, int to, int depth) {
    DIR *directory = fdopendir(from);
    must(directory != NULL, "a folder");
    for (struct dirent *entry; (entry = readdir(directory));)
        if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, "..")) keep_entry(from, to, entry->d_name, depth);
    closedir(directory);
}

/* Writes the changes into the container's own root, which the engine can commit as an image. */
void root_keep(uint64_t limit) {
    budget = limit;
    entries = limit / BLOCK;
    must(unshare(CLONE_NEWNS) == 0 && mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0, "a view of its own");
    must(mount(NULL, IMAGE, NULL, MS_REMOUNT | MS_BIND, NULL) == 0, IMAGE);
    must(mount(NULL, LAYER, NULL, MS_REMOUNT | MS_BIND, NULL) == 0, LAYER);
    int from = open(CHANGES, O_RDONLY | O_DIRECTORY | O_CLOEXEC), to = open(IMAGE, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    must(from >= 0 && to >= 0, LAYER);
    keep_folder(from, to, 0);
    close(to);
}

/* Files that the engine reads in the sandbox before it starts a program (runc: the user's entry). It would block
 * forever on a FIFO and on some files of the kernel. */
static const char *const engine_reads[] = {"/etc/passwd", "/etc/group"};

/* Links may lead only to what the root itself has: in a fork every other file system is a new one, whose devices code
 * inside cannot have removed. */
static int open_of_root(const char *path) {
    const struct {
        uint64_t flags, mode, resolve;
    } how = {O_PATH | O_CLOEXEC, 0, NO_OTHER_MOUNT | NO_LINK_OF_PROC};
    int file = (int)syscall(OPENAT2, AT_FDCWD, path, &how, sizeof how);
    if (file < 0 && (errno == ENOSYS || errno == EPERM)) return open(path, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    return file;
}

static bool is_plain(const char *path) {
    struct stat status;
    struct statfs system;
    int file = open_of_root(path);
    if (file < 0) return errno == ENOENT || errno == ENOTDIR;
    bool plain = fstat(file, &status) == 0 && S_ISREG(status.st_mode) && fstatfs(file, &system) == 0 && system.f_type == OVERLAY;
    close(file);
    errno = EINVAL;
    return plain;
}

static void take_room(void) {
    int score = members_open("self/oom_score_adj", O_WRONLY);
    if (score >= 0 && write(score, "1000", 4) < 0) close(score);
    volatile char *memory = mmap(NULL, ROOM, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) _exit(1);
    for (size_t at = 0; at < ROOM; at += BLOCK) memory[at] = 1;
    _exit(0);
}

/* True if a child could take ROOM; it gives it back. Without it the engine's program would use up the memory, and the
 * kernel end a stopped process: that continues others (PR_SET_PDEATHSIG, orphaned process groups). */
static bool has_room(void) {
    int status, got;
    int64_t give_up = now_us() + ROOM_US;
    pid_t child = fork();
    if (child < 0) return false;
    if (child == 0) take_room();
    while ((got = waitpid(child, &status, WNOHANG)) == 0) {
        if (now_us() >= give_up) kill(child, SIGKILL);
        usleep(1000);
    }
    return got == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

/* Stops every process before the engine runs root_keep, so that the checked files do not change. */
void root_pause(uint32_t channel) {
    /* A process may wait for a child stopped before exec; has_room may have let one continue. */
    for (int tries = 1; !members_pause(true) || !has_room() || !members_pause(true); tries++) {
        members_pause(false);
        if (tries == MOST_TRIES) {
            send_error(channel, EBUSY, "what runs in it does not stop, or leaves no memory");
            return;
        }
        usleep(10000);
    }
    for (size_t i = 0; i < sizeof engine_reads / sizeof *engine_reads; i++) {
        if (is_plain(engine_reads[i])) continue;
        int error = errno;
        char what[64];
        snprintf(what, sizeof what, "%s is no plain file", engine_reads[i]);
        members_pause(false);
        send_error(channel, error, what);
        return;
    }
    send_done(channel);
}

void root_resume(uint32_t channel) {
    members_pause(false);
    send_done(channel);
}
