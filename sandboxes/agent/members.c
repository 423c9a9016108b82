/* Finds the processes of a command. A command's first process gets a unique number as its limit on file locks, which
 * kernels have not used since 2.4. Children inherit it and a filter prevents changes, so a process is still recognized
 * when all its ancestors have ended. */
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
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* /proc/PID/stat from the state on: field 18 is the number of threads, field 20 the start time in ticks. */
#define UP_TO_THREADS " %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %ld"
#define AFTER_NAME " %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu"

enum { STILL_US = 300000, MOST_UNLOCKS = 200, MOST_LOCKS = 10000, MOST_SOCKETS = 2000, MOST_TERMINALS = 256 };
enum { MOST_KILLS = 10, PAUSE_US = 2000000 };

struct pids {
    pid_t *at;
    size_t count, capacity;
};

#define LOAD(offset) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offset)
#define ARGUMENT(number) offsetof(struct seccomp_data, args[number])
#define IF_EQUAL(value, skip, skip_otherwise) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, skip, skip_otherwise)

/* Refuses setrlimit of RLIMIT_LOCKS, and prlimit of it with a new value; reading it is allowed. For RLIMIT_CORE the
 * call succeeds and does nothing: programs that disable their own dumps treat a failure as an attack. A command cannot
 * install its own filters, as on a kernel without seccomp: the memory of compiled filters is counted over the whole
 * machine, and if a few sandboxes use it up, no command starts in any sandbox. */
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

/* Called in the child that becomes the command. If the kernel refuses the limit (gVisor), the command has no number. */
bool members_mark(uint64_t command) {
    const struct sock_fprog program = {sizeof keep_mark / sizeof *keep_mark, keep_mark};
    const struct rlimit mark = {command, command};
    if (setrlimit(RLIMIT_LOCKS, &mark) < 0) return errno == EPERM || errno == EINVAL;
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

static int processes = -1; /* /proc, opened before code inside could lock it, or the root above it */

void members_prepare(void) {
    processes = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (processes < 0) die("/proc cannot be read");
}

/* Opens a path below /proc. Root inside owns that folder and may take away its permissions, also again and again;
 * without them no process can be told from another. */
int members_open(const char *path, int flags) {
    int fd = openat(processes, path, flags | O_CLOEXEC);
    for (int tries = 0; fd < 0 && errno == EACCES && tries < MOST_UNLOCKS && fchmod(processes, 0555) == 0; tries++)
        fd = openat(processes, path, flags | O_CLOEXEC);
    return fd;
}

static bool read_entry(pid_t pid, const char *name, char *text, size_t size) {
    char path[48];
    snprintf(path, sizeof path, "%d/%s", pid, name);
    int fd = members_open(path, O_RDONLY);
    if (fd < 0) return false;
    ssize_t got = read(fd, text, size - 1);
    close(fd);
    text[got > 0 ? got : 0] = 0;
    return got > 0;
}

/* A process without a number may belong to any command, so it counts as this command's. */
static bool belongs(pid_t pid, uint64_t command) {
    char text[4096];
    unsigned long long mark;
    if (!read_entry(pid, "limits", text, sizeof text)) return false;
    const char *line = strstr(text, "Max file locks");
    return !line || sscanf(line, "Max file locks %llu", &mark) != 1 || mark == command;
}

/* Returns the state letter in /proc/PID/stat, 'X' if the process is gone. */
static char state_of(pid_t pid) {
    char text[1024];
    const char *name_end = read_entry(pid, "stat", text, sizeof text) ? strrchr(text, ')') : NULL;
    return name_end && name_end[1] ? name_end[2] : 'X';
}

bool members_is_stopped(pid_t pid) { return state_of(pid) == 'T'; }

/* A zombie with other threads is not dead: only its first thread has ended. */
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

/* Lists all processes but this one, or only the stopped ones. */
static void list_processes(struct pids *found, bool only_stopped) {
    int copy = fcntl(processes, F_DUPFD_CLOEXEC, 0); /* readable whatever the folder's permissions are now */
    DIR *directory = copy < 0 ? NULL : fdopendir(copy);
    if (!directory) die("/proc cannot be read");
    rewinddir(directory);
    found->count = 0;
    for (struct dirent *entry; (entry = readdir(directory));) {
        pid_t pid = isdigit((unsigned char)entry->d_name[0]) ? atoi(entry->d_name) : 0;
        if (pid && pid != getpid() && (!only_stopped || state_of(pid) == 'T')) add(found, pid);
    }
    closedir(directory);
}

static struct pids stopped, all; /* `stopped`: processes not stopped by the agent, which must stay stopped */
static bool paused;

static void stop_all(void) {
    if (!paused) {
        list_processes(&stopped, true);
        kill(-1, SIGSTOP);
    }
    list_processes(&all, false);
}

/* One call stops every process, so that members cannot escape the search by forking; then other commands continue.
 * A child whose fork was in progress may appear after the search, stopped from its start: members_end finds it. */
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

/* Checks all threads: one may still be inside a system call when the first one has stopped. */
static bool stands_still(pid_t pid) {
    char path[48], text[1024];
    snprintf(path, sizeof path, "%d/task", pid);
    int fd = members_open(path, O_RDONLY | O_DIRECTORY);
    DIR *directory = fd < 0 ? NULL : fdopendir(fd);
    bool still = true;
    for (struct dirent *entry; directory && still && (entry = readdir(directory));) {
        snprintf(path, sizeof path, "task/%.11s/stat", entry->d_name);
        const char *name_end = isdigit((unsigned char)entry->d_name[0]) && read_entry(pid, path, text, sizeof text) ? strrchr(text, ')') : NULL;
        still = !name_end || !name_end[1] || strchr("TtZX", name_end[2]);
    }
    if (directory) closedir(directory);
    return still;
}

/* True if the process has a timer with SIGCONT or SIGKILL, which act on stopped processes too: the process would
 * continue, or end and let another one continue. */
static bool has_alarm_clock(pid_t pid) {
    char path[48], line[128];
    int number = 0;
    snprintf(path, sizeof path, "%d/timers", pid);
    int fd = members_open(path, O_RDONLY);
    FILE *timers = fd < 0 ? NULL : fdopen(fd, "r");
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

/* Stops (or continues) every process but this one. Returns false if a process does not stop in time (it first finishes
 * a system call) or would not stay stopped. */
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

/* Returns the start time of a process in microseconds since boot; 0 if it is gone. */
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

/* True if no new process appeared while `all` was searched, so `all` is complete. */
static bool is_complete(void) {
    static struct pids now;
    list_processes(&now, false);
    for (size_t i = 0; i < now.count; i++)
        if (!holds(&all, now.at[i])) return false;
    return true;
}

/* Kills the members left after a SIGKILL for all. Returns MEMBERS_GONE only for a complete list: a process that ends
 * before it is checked may have a child that is not on the list. */
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

bool members_exist(void) {
    siginfo_t information;
    return waitid(P_ALL, 0, &information, WEXITED | WNOHANG | WNOWAIT) == 0;
}

static FILE *open_table(const char *path) {
    int fd = members_open(path, O_RDONLY);
    return fd < 0 ? NULL : fdopen(fd, "r");
}

/* Those whose process has ended are not listed, and those of open files (OFD) are listed in all sandboxes: confine.c
 * refuses what makes such ones. */
static bool has_too_many_locks(void) {
    char line[256];
    int count = 0;
    FILE *locks = open_table("locks");
    while (locks && count <= MOST_LOCKS && fgets(line, sizeof line, locks)) count += !strstr(line, "OFDLCK");
    if (locks) fclose(locks);
    return count > MOST_LOCKS;
}

/* Only root inside can hide what its own namespaces have. */
static bool is_hidden(void) { return errno == EACCES && geteuid() == 0; }

/* Counts connections that nobody accepts, too, and the sockets of neighbours in one network. */
static bool has_too_many_sockets(void) {
    int count = 0;
    FILE *sockets = open_table("net/sockstat");
    if (!sockets) return is_hidden();
    if (fscanf(sockets, "sockets: used %d", &count) != 1) count = 0;
    fclose(sockets);
    return count > MOST_SOCKETS;
}

/* Terminals are also counted over the machine. Their folder may belong to the user inside, who may hide it. */
static bool has_too_many_terminals(void) {
    int count = 0;
    DIR *directory = opendir("/dev/pts");
    if (!directory && errno == EACCES && chmod("/dev/pts", 0755) == 0) directory = opendir("/dev/pts");
    if (!directory) return errno == EACCES;
    while (count <= MOST_TERMINALS && readdir(directory)) count++;
    closedir(directory);
    return count > MOST_TERMINALS;
}

/* True if more than MOST_KILLS processes a second ran out of memory. The kernel writes a line for each into the log and
 * on the console of the machine, and the engine tells all who listen: for 60 a second they took a fifth of a processor
 * outside of the sandbox's limits. */
static bool runs_out_of_memory_too_often(void) {
    static long known;
    static int64_t looked_us;
    char line[256];
    long count = known;
    FILE *events = fopen("/sys/fs/cgroup/memory.events", "re");
    if (!events) events = fopen("/sys/fs/cgroup/memory/memory.oom_control", "re"); /* version 1 of control groups */
    while (events && fgets(line, sizeof line, events)) sscanf(line, "oom_kill %ld", &count);
    if (events) fclose(events);
    int64_t now = now_us();
    /* Looks are a second apart while something runs: what ran before a pause is gone, and others do not answer for it. */
    bool too_often = now - looked_us < PAUSE_US && (count - known) * 1000000 > MOST_KILLS * (now - looked_us);
    known = count;
    looked_us = now;
    return too_often;
}

/* Kills everything but this process if it holds more locks on files, sockets or terminals than any program needs. They
 * are memory of the kernel that no limit counts: a processor makes 100 MB of locks in a second, each socket keeps 0.2 MB
 * of errors and time stamps that nobody fetches, and each terminal 50 KB. Also if it runs out of its own too often. */
void members_limit_kernel_memory(void) {
    bool too_often = runs_out_of_memory_too_often();
    if (too_often || has_too_many_locks() || has_too_many_sockets() || has_too_many_terminals()) kill(-1, SIGKILL);
}
