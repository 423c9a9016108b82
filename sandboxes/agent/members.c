/* Which command a process belongs to. A command's first process gets a number of its own as its limit on file locks,
 * which kernels have not used since 2.4. Children inherit it and a filter keeps it as it is, so a process is known also
 * when all that it descends from have ended. */
#include "agent.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* /proc/PID/stat from the state on: the 18th is the number of threads, the 20th when the process began, in ticks. */
#define UP_TO_THREADS " %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %ld"
#define AFTER_NAME " %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu"

enum { STILL_US = 300000 };

struct pids {
    pid_t *at;
    size_t count, capacity;
};

#define LOAD(offset) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offset)
#define ARGUMENT(number) offsetof(struct seccomp_data, args[number])
#define IF_EQUAL(value, skip, skip_otherwise) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, skip, skip_otherwise)

/* No setrlimit of RLIMIT_LOCKS, and no prlimit of it with a new value; it may be asked for. The same for RLIMIT_CORE,
 * for which the call succeeds and does nothing: programs that switch off their own dumps take a failure for an attack.
 * And no filters of a command's own, as on a kernel that has none: the memory for compiled ones is counted over the whole
 * machine, and when a few sandboxes have used it up no command starts in any. */
static struct sock_filter keep_mark[] = {
    LOAD(offsetof(struct seccomp_data, nr)),
    IF_EQUAL(SYS_seccomp, 3, 0),
    IF_EQUAL(SYS_prctl, 0, 3),
    LOAD(ARGUMENT(0)),
    IF_EQUAL(PR_SET_SECCOMP, 0, 15),
    BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EINVAL),
    IF_EQUAL(SYS_setrlimit, 0, 3),
    LOAD(ARGUMENT(0)),
    IF_EQUAL(RLIMIT_LOCKS, 9, 0),
    IF_EQUAL(RLIMIT_CORE, 9, 10),
    IF_EQUAL(SYS_prlimit64, 0, 9),
    LOAD(ARGUMENT(2)),
    IF_EQUAL(0, 0, 2),
    LOAD(ARGUMENT(2) + 4),
    IF_EQUAL(0, 5, 0),
    LOAD(ARGUMENT(1)),
    IF_EQUAL(RLIMIT_LOCKS, 1, 0),
    IF_EQUAL(RLIMIT_CORE, 1, 2),
    BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
    BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | 0),
    BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
};

/* Called in the child that becomes the command. Kernels that refuse the limit (gVisor) leave it without a number. */
bool members_mark(uint64_t command) {
    const struct sock_fprog program = {sizeof keep_mark / sizeof *keep_mark, keep_mark};
    const struct rlimit mark = {command, command};
    if (setrlimit(RLIMIT_LOCKS, &mark) < 0) return errno == EPERM || errno == EINVAL;
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

static bool read_entry(pid_t pid, const char *name, char *text, size_t size) {
    char path[48];
    snprintf(path, sizeof path, "/proc/%d/%s", pid, name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    ssize_t got = read(fd, text, size - 1);
    close(fd);
    text[got > 0 ? got : 0] = 0;
    return got > 0;
}

/* One without a number may be anybody's, so it counts as this command's. */
static bool belongs(pid_t pid, uint64_t command) {
    char text[4096];
    unsigned long long mark;
    if (!read_entry(pid, "limits", text, sizeof text)) return false;
    const char *line = strstr(text, "Max file locks");
    return !line || sscanf(line, "Max file locks %llu", &mark) != 1 || mark == command;
}

/* The letter in /proc/PID/stat, 'X' if it is gone. */
static char state_of(pid_t pid) {
    char text[1024];
    const char *name_end = read_entry(pid, "stat", text, sizeof text) ? strrchr(text, ')') : NULL;
    return name_end && name_end[1] ? name_end[2] : 'X';
}

bool members_is_stopped(pid_t pid) { return state_of(pid) == 'T'; }

/* A zombie may be a first thread that has ended before the others of its process. */
static bool is_dead(pid_t pid) {
    char text[1024];
    long threads;
    const char *name_end = read_entry(pid, "stat", text, sizeof text) ? strrchr(text, ')') : NULL;
    if (!name_end || !name_end[1] || name_end[2] == 'X') return true;
    return name_end[2] == 'Z' && sscanf(name_end + 1, UP_TO_THREADS, &threads) == 1 && threads < 2;
}

static void add(struct pids *pids, pid_t pid) {
    if (pids->count == pids->capacity) {
        pids->capacity = pids->capacity ? 2 * pids->capacity : 64;
        pids->at = realloc(pids->at, pids->capacity * sizeof *pids->at);
        if (!pids->at) die("out of memory");
    }
    pids->at[pids->count++] = pid;
}

static bool holds(const struct pids *pids, pid_t pid) {
    for (size_t i = 0; i < pids->count; i++)
        if (pids->at[i] == pid) return true;
    return false;
}

/* All processes but this one, or those that are stopped. */
static void list_processes(struct pids *found, bool only_stopped) {
    DIR *directory = opendir("/proc");
    if (!directory) die("/proc cannot be read");
    found->count = 0;
    for (struct dirent *entry; (entry = readdir(directory));) {
        pid_t pid = isdigit((unsigned char)entry->d_name[0]) ? atoi(entry->d_name) : 0;
        if (pid && pid != getpid() && (!only_stopped || state_of(pid) == 'T')) add(found, pid);
    }
    closedir(directory);
}

static struct pids stopped, all; /* stopped before they were stopped from here, and so to stay */
static bool paused;

static void stop_all(void) {
    if (!paused) {
        list_processes(&stopped, true);
        kill(-1, SIGSTOP);
    }
    list_processes(&all, false);
}

/* Everything is stopped by one call, so that members cannot run from the search by forking; then others go on.
 * A child whose fork was under way may come up after the search. It is stopped from its birth: members_end finds it. */
void members_signal(uint64_t command, int number) {
    stop_all();
    for (size_t i = 0; i < all.count; i++) {
        bool member = belongs(all.at[i], command);
        if (member) kill(all.at[i], number);
        if (!paused && (member || !holds(&stopped, all.at[i]))) kill(all.at[i], SIGCONT);
    }
}

static void continue_all(void) {
    list_processes(&all, false);
    for (size_t i = 0; i < all.count; i++)
        if (!holds(&stopped, all.at[i])) kill(all.at[i], SIGCONT);
}

/* Of all its threads: one may still be in the middle of a system call when the first one has stopped. */
static bool stands_still(pid_t pid) {
    char path[48], text[1024];
    snprintf(path, sizeof path, "/proc/%d/task", pid);
    DIR *directory = opendir(path);
    bool still = true;
    for (struct dirent *entry; directory && still && (entry = readdir(directory));) {
        snprintf(path, sizeof path, "task/%.11s/stat", entry->d_name);
        const char *name_end = isdigit((unsigned char)entry->d_name[0]) && read_entry(pid, path, text, sizeof text) ? strrchr(text, ')') : NULL;
        still = !name_end || !name_end[1] || strchr("TtZX", name_end[2]);
    }
    if (directory) closedir(directory);
    return still;
}

/* A timer whose signal the kernel sends to who is stopped all the same: it goes on, or ends and another one goes on. */
static bool has_alarm_clock(pid_t pid) {
    char path[48], line[128];
    int number = 0;
    snprintf(path, sizeof path, "/proc/%d/timers", pid);
    FILE *timers = fopen(path, "re");
    while (timers && number != SIGCONT && number != SIGKILL && fgets(line, sizeof line, timers)) sscanf(line, "signal: %d/", &number);
    if (timers) fclose(timers);
    return number == SIGCONT || number == SIGKILL;
}

static bool all_stand_still(void) {
    list_processes(&all, false);
    for (size_t i = 0; i < all.count; i++)
        if (!stands_still(all.at[i]) || has_alarm_clock(all.at[i])) return false;
    return true;
}

/* Stop everything but this process until it is to go on. False if something does not stand still in time: what a call to
 * the kernel had begun when it was stopped is done first; or if it would not stay so. */
bool members_pause(bool pause) {
    int64_t give_up = now_us() + STILL_US;
    if (pause) stop_all();
    else if (paused) continue_all();
    paused = pause;
    while (pause && !all_stand_still()) {
        if (now_us() >= give_up) return false;
        usleep(1000);
    }
    return true;
}

/* When a process began, in microseconds since the machine did; 0 if it is gone. */
static int64_t began_us(pid_t pid) {
    char text[1024];
    unsigned long long ticks;
    const char *name_end = read_entry(pid, "stat", text, sizeof text) ? strrchr(text, ')') : NULL;
    if (!name_end || sscanf(name_end + 1, AFTER_NAME, &ticks) != 1) return 0;
    return (int64_t)(ticks * 1000000 / (unsigned long long)sysconf(_SC_CLK_TCK));
}

int64_t members_clock_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_BOOTTIME, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

static enum members end_those_seen(uint64_t command, int64_t since_us) {
    enum members found = MEMBERS_GONE;
    for (size_t i = 0; i < all.count; i++) {
        if (!belongs(all.at[i], command) || is_dead(all.at[i])) continue;
        if (began_us(all.at[i]) > since_us) found = MEMBERS_ESCAPE;
        else if (found == MEMBERS_GONE) found = MEMBERS_DIE;
        kill(all.at[i], SIGKILL);
    }
    return found;
}

/* Nobody has come up while all were looked at: then those are all there are. */
static bool is_complete(void) {
    static struct pids now;
    list_processes(&now, false);
    for (size_t i = 0; i < now.count; i++)
        if (!holds(&all, now.at[i])) return false;
    return true;
}

/* Kill what is left after a SIGKILL for all. That nothing is left is said only of a list that is complete: one that ends
 * before it is looked at may have a successor that is not on it. */
enum members members_end(uint64_t command, int64_t since_us) {
    list_processes(&all, false);
    enum members found = end_those_seen(command, since_us);
    if (found != MEMBERS_GONE) return found;
    stop_all();
    found = end_those_seen(command, since_us);
    if (found == MEMBERS_GONE && !is_complete()) found = MEMBERS_ESCAPE;
    if (!paused) continue_all();
    return found;
}
