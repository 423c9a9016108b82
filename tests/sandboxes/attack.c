/* What a hostile program tries with the kernel, one attempt per call; prints `0` or the name of the error. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <linux/filter.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

static int told(long result) {
    printf("%s\n", result >= 0 ? "0" : strerror(errno));
    return 0;
}

static long read_memory(int pid) {
    char byte;
    struct iovec here = {&byte, 1}, there = {(void *)0x400000, 1};
    return process_vm_readv(pid, &here, 1, &there, 1, 0);
}

static long swap_passwd(int count) {  // a file and a pipe, again and again, and stays
    for (int i = 0; i < count; i++) {
        if (fork()) continue;
        char file[32], pipe[32];
        setsid();
        snprintf(file, sizeof file, "/etc/file%d", i);
        snprintf(pipe, sizeof pipe, "/etc/pipe%d", i);
        for (;;) {
            close(open(file, O_CREAT | O_WRONLY, 0644));
            mkfifo(pipe, 0644);
            rename(pipe, "/etc/passwd");
            rename(file, "/etc/passwd");
        }
    }
    return 0;
}

static void swap_once(int number) {
    (void)number;
    rename("/etc/pipe", "/etc/passwd");
}

static long alarm_clock(int number) {  // wakes this program when it has been stopped, and stays
    timer_t timer;
    int ready[2];
    char byte;
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = number};
    const struct itimerspec soon = {{0, 0}, {0, 20000000}};
    mkfifo("/etc/pipe", 0644);
    if (pipe(ready)) return -1;
    if (fork() != 0) {
        close(ready[1]);
        return read(ready[0], &byte, 1) == 1 ? 0 : -1;
    }
    setsid();
    signal(SIGCONT, swap_once);
    if (timer_create(CLOCK_MONOTONIC, &event, &timer)) _exit(1);
    if (write(ready[1], "", 1) != 1) _exit(1);
    for (;;) {
        timer_settime(timer, 0, &soon, NULL);
        usleep(500);
    }
}

static long number_in(const char *path, const char *name) {
    char text[8192] = "";
    int file = open(path, O_RDONLY);
    if (file < 0 || read(file, text, sizeof text - 1) < 0) return 0;
    close(file);
    const char *at = strstr(text, name);
    return at ? atol(at + strlen(name)) : 0;
}

static long memory_left(void) {
    if (access("/sys/fs/cgroup/memory", F_OK))
        return number_in("/sys/fs/cgroup/memory.max", "") - number_in("/sys/fs/cgroup/memory.current", "") +
               number_in("/sys/fs/cgroup/memory.stat", "\ninactive_file ") + number_in("/sys/fs/cgroup/memory.stat", "\nactive_file ");
    return number_in("/sys/fs/cgroup/memory/memory.limit_in_bytes", "") - number_in("/sys/fs/cgroup/memory/memory.usage_in_bytes", "") +
           number_in("/sys/fs/cgroup/memory/memory.stat", "\ntotal_inactive_file ") + number_in("/sys/fs/cgroup/memory/memory.stat", "\ntotal_active_file ");
}

static void take_memory(long most, long leave) {
    for (long taken = 0; taken < most && memory_left() > leave; taken += 65536)
        memset(mmap(NULL, 65536, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), 1, 65536);
}

static void be_ended_first(void) {  // and let a child continue by that
    pid_t this = getpid();
    if (fork() == 0) {
        char pipe[32];
        prctl(PR_SET_PDEATHSIG, SIGCONT);
        snprintf(pipe, sizeof pipe, "/etc/pipe%d", getpid());
        mkfifo(pipe, 0644);
        while (getppid() == this) usleep(1000);
        rename(pipe, "/etc/passwd");
        pause();
    }
    int score = open("/proc/self/oom_score_adj", O_WRONLY);
    if (write(score, "1000", 4) == 4) take_memory(1500000, 0);
    pause();
}

static long wake_by_memory(void) {  // leaves hardly any, and stays
    setsid();
    for (int i = 0; i < 8; i++)
        if (fork() == 0) be_ended_first();
    sleep(1);
    while (memory_left() > 600000) {
        if (fork() == 0) {
            take_memory(16 << 20, 600000);
            pause();
        }
        usleep(100000);
    }
    puts("full");
    fflush(stdout);
    return pause();
}

static long forks(void) {  // and stays
    int count = 0;
    for (;;) {
        pid_t pid = fork();
        if (pid < 0) break;
        if (pid == 0) pause();
        count++;
    }
    printf("%d forks\n", count);
    fflush(stdout);
    return pause();
}

static long page_policy(void) {  // stays with the file behind the page, also when that is no longer mapped
    const unsigned long node = 1;
    void *page = mmap(NULL, 4096, PROT_READ, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return syscall(SYS_mbind, page, 4096L, 2L /* MPOL_BIND */, &node, 64L, 0L);
}

static long fill_memory(void) {
    for (size_t megabytes = 0;; megabytes++) {
        volatile char *block = malloc(1 << 20);
        if (!block) return -1;
        for (size_t at = 0; at < 1 << 20; at += 4096) block[at] = 1;
    }
}

static long run_out_of_memory(int seconds) {  // again and again
    time_t end = time(NULL) + seconds;
    while (time(NULL) < end) {
        pid_t child = fork();
        if (child == 0) {
            int score = open("/proc/self/oom_score_adj", O_WRONLY);
            if (write(score, "1000", 4) == 4) fill_memory();
        }
        waitpid(child, NULL, 0);
    }
    return 0;
}

static long change_mark(void) {  // the limit that tells whose a process is
    struct rlimit mark;
    if (getrlimit(RLIMIT_LOCKS, &mark) < 0) return -1;
    mark.rlim_cur = mark.rlim_max = mark.rlim_max - 1;
    if (setrlimit(RLIMIT_LOCKS, &mark) == 0 || prlimit(0, RLIMIT_LOCKS, &mark, NULL) == 0) return 0;
    return syscall(SYS_setrlimit, RLIMIT_LOCKS, &mark);
}

static void hand_on(int in_new_session) {  // each forks its successor and ends: no list of processes shows it for sure
    for (;;) {
        close(open("/tmp/alive", O_CREAT | O_WRONLY, 0600));
        if (in_new_session) setsid();
        if (fork() != 0) _exit(0);
    }
}

static void *hand_on_from_a_thread(void *none) {  // whose process looks like a zombie, as its first thread has ended
    pthread_t successor;
    (void)none;
    for (;;) {
        close(open("/tmp/alive", O_CREAT | O_WRONLY, 0600));
        usleep(1000);
        if (fork() != 0) _exit(0);
        if (pthread_create(&successor, NULL, hand_on_from_a_thread, NULL)) _exit(1);
        syscall(SYS_exit, 0);
    }
}

static void end_slowly(int number) {
    usleep(20000 + 0 * number);
    _exit(0);
}

static long chain(int chains, int ignores_term, int in_threads) {  // whose first process dies on TERM unless told otherwise
    signal(SIGCHLD, SIG_IGN);  // what has ended must not fill the process limit
    for (int i = 0; i < chains; i++) {
        if (fork() != 0) continue;
        signal(SIGTERM, SIG_IGN);
        if (in_threads) hand_on_from_a_thread(NULL);
        hand_on(i % 2);
    }
    signal(SIGTERM, ignores_term ? SIG_IGN : end_slowly);
    for (;;) pause();
}

static long idle_all(long busy) {  // whatever starts, as soon as it does, while others use all processors
    struct sched_param none = {0};
    setsid();
    for (long i = 0; i < busy; i++)
        if (fork() == 0)
            for (volatile long count = 0;; count++) {}
    for (;;) {
        pid_t newest = fork();
        if (newest == 0) _exit(0);
        if (newest < 0 || waitpid(newest, NULL, 0) < 0) continue;
        for (int round = 0; round < 100000; round++)
            for (pid_t next = newest + 1; next < newest + 20; next++) syscall(SYS_sched_setscheduler, next, 5 /* SCHED_IDLE */, &none);
    }
}

static long stop_all(void) {  // whatever starts, as soon as it does
    usleep(300000);  // the command that started it has ended by then
    for (;;) kill(-1, SIGSTOP);
}

static struct sock_filter allow[] = {BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
static struct sock_fprog allow_all = {1, allow};

static long attach_program(int option) {
    struct sock_filter all = BPF_STMT(BPF_RET | BPF_K, 0xffff);
    struct sock_fprog program = {1, &all};
    return setsockopt(socket(AF_INET, SOCK_DGRAM, 0), SOL_SOCKET, option, &program, sizeof program);
}

static long go_on(int helpers) {  // continue whatever is stopped, as fast as one can
    for (int i = 1; i < helpers; i++)
        if (fork() == 0) break;
    signal(SIGTERM, SIG_IGN);
    for (;;) kill(-1, SIGCONT);
}

static int take_inotify(void) { return inotify_init1(0); }

static int take_timer(void) {
    timer_t timer;
    struct sigevent quiet = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1};
    return (int)syscall(SYS_timer_create, CLOCK_MONOTONIC, &quiet, &timer);
}

static int take_pipe(void) {  // with as much capacity as one may have
    int ends[2];
    return pipe(ends) < 0 ? -1 : fcntl(ends[0], F_SETPIPE_SZ, 1 << 20);
}

static int take_rights(void) {  // a descriptor that is on its way, and that nobody takes
    static int ends[2], left;
    char byte = 0, room[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec data = {&byte, 1};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    if (left-- == 0) {
        left = 99;
        if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) < 0) return -1;
    }
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(head), &ends[0], sizeof(int));
    return (int)sendmsg(ends[0], &message, MSG_DONTWAIT);
}

static int take_queue(void) {
    static int number;
    char name[32];
    snprintf(name, sizeof name, "queue%d", number++);
    return (int)syscall(SYS_mq_open, name, O_RDWR | O_CREAT, 0600, NULL);
}

static long take_locks(long most) {  // of a few hundred bytes in each of many files
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 1};
    char name[32];
    long taken = 0;
    for (int number = 0; taken < most; number++) {
        snprintf(name, sizeof name, "/tmp/locked%d", number);
        int fd = open(name, O_RDWR | O_CREAT, 0600);
        if (fd < 0) break;
        for (lock.l_start = 600; lock.l_start > 0 && taken < most; lock.l_start -= 2, taken++)
            if (fcntl(fd, F_SETLK, &lock) < 0) return -1;
    }
    printf("%ld\n", taken);
    fflush(stdout);
    sleep(4);
    return 0;
}

static long set_access_list(long by) {
    static const struct { uint16_t tag, rights; uint32_t user; } all[] = {{1, 6, -1u}, {2, 4, 7}, {4, 4, -1u}, {16, 4, -1u}, {32, 4, -1u}};
    static char list[4 + sizeof all] = {2};
    struct { uint64_t value; uint32_t size, flags; } argument = {(uint64_t)list, sizeof list, 0};
    const char *name = "system.posix_acl_access", *path = "/tmp/listed";
    int fd = open(path, O_RDWR | O_CREAT, 0600);
    memcpy(list + 4, all, sizeof all);
    if (by == 0) return setxattr(path, name, list, sizeof list, 0);
    if (by == 1) return lsetxattr(path, name, list, sizeof list, 0);
    if (by == 2) return fsetxattr(fd, name, list, sizeof list, 0);
    return syscall(463, AT_FDCWD, path, 0, name, &argument, sizeof argument);  // setxattrat (Linux 6.13)
}

static long take_terminals(long most) {
    for (long taken = 0; taken < most; taken++)
        if (posix_openpt(O_RDWR | O_NOCTTY) < 0) return taken;
    sleep(4);
    return 0;
}

static long take_sockets(long most) {  // in processes of 500
    for (long taken = 0; taken < most; taken += 500) {
        if (fork()) continue;
        for (int i = 0; i < 500; i++) socket(AF_INET, SOCK_DGRAM, 0);
        return pause();
    }
    sleep(4);
    return 0;
}

static long lock_open_file(void) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 1};
    return fcntl(open("/tmp/locked", O_RDWR | O_CREAT, 0600), F_OFD_SETLK, &lock);
}

static long take(const char *what, long most) {  // and keep, until nothing more is given
    int (*one)(void) = !strcmp(what, "inotify") ? take_inotify : !strcmp(what, "timer") ? take_timer
                       : !strcmp(what, "pipe")  ? take_pipe
                       : !strcmp(what, "queue") ? take_queue
                                                : take_rights;
    long taken = 0;
    while (taken < most && one() >= 0) taken++;
    printf("%ld\n", taken);
    fflush(stdout);
    if (most > 1) sleep(60);
    exit(0);
}

static long change_agent(const char *what) {  // process 1 has this program's user
    struct rlimit few = {20, 20};
    struct sched_param none = {0};
    cpu_set_t first;
    CPU_ZERO(&first);
    CPU_SET(0, &first);
    if (!strcmp(what, "limit")) return prlimit(1, RLIMIT_NOFILE, &few, NULL);
    if (!strcmp(what, "nice")) return setpriority(PRIO_PROCESS, 1, 19);
    if (!strcmp(what, "nice-group")) return setpriority(PRIO_PGRP, 1, 19);
    if (!strcmp(what, "nice-user")) return setpriority(PRIO_USER, 0, 19);
    if (!strcmp(what, "processors")) return sched_setaffinity(1, sizeof first, &first);
    if (!strcmp(what, "idle")) return syscall(SYS_sched_setscheduler, 1, 5 /* SCHED_IDLE */, &none);
    if (!strcmp(what, "io-idle")) return syscall(SYS_ioprio_set, 1, 1, 3 << 13);
    return syscall(SYS_ioprio_set, 3, getuid(), 3 << 13);
}

static long change_priority(const char *what) {  // of a process that is starting, and of this one
    struct sched_param none = {0};
    uint64_t attributes[6] = {48 | 5ull << 32};  // SCHED_IDLE
    for (int other = 0; other < 2; other++) {
        pid_t pid = other ? fork() : 0;
        if (other && pid == 0) return pause();
        long result = !strcmp(what, "nice")   ? setpriority(PRIO_PROCESS, (id_t)pid, 19)
                      : !strcmp(what, "idle") ? syscall(SYS_sched_setscheduler, pid, 5 /* SCHED_IDLE */, &none)
                                              : syscall(SYS_sched_setattr, pid, attributes, 0);
        printf("%ld %d %d\n", result, getpriority(PRIO_PROCESS, (id_t)pid), (int)syscall(SYS_sched_getscheduler, pid));
        if (other) kill(pid, SIGKILL);
    }
    return 0;
}

static long change_core(void) {  // 0 would let a pipe in core_pattern have it
    struct rlimit none = {0, 0}, found;
    if (setrlimit(RLIMIT_CORE, &none) < 0 || prlimit(0, RLIMIT_CORE, &none, NULL) < 0) return -1;
    if (syscall(SYS_setrlimit, RLIMIT_CORE, &none) < 0 || getrlimit(RLIMIT_CORE, &found) < 0) return -1;
    printf("%ld %ld\n", (long)found.rlim_cur, (long)found.rlim_max);
    return 0;
}

static int listener(struct sockaddr_in *address) {
    socklen_t size = sizeof *address;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    *address = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    if (bind(fd, (struct sockaddr *)address, size) < 0 || listen(fd, 1) < 0) exit(65);
    getsockname(fd, (struct sockaddr *)address, &size);
    return fd;
}

static long fill_connections(int most) {  // with bytes that nobody reads; how many MiB
    static char block[1 << 16];
    struct sockaddr_in address;
    int server = listener(&address);
    size_t held = 0;
    for (int i = 0; i < most; i++) {
        int fd = socket(AF_INET, SOCK_STREAM, 0), idle = 0;
        if (connect(fd, (struct sockaddr *)&address, sizeof address) < 0 || accept(server, NULL, NULL) < 0) break;
        while (idle < 3) {
            ssize_t sent = send(fd, block, sizeof block, MSG_DONTWAIT);
            idle = sent > 0 ? 0 : idle + 1;
            if (sent > 0) held += (size_t)sent;
            else usleep(1000);
        }
    }
    printf("%zu\n", held >> 20);
    return 0;
}

static long lease(const char *path) {  // whoever opens the file waits until it is given back
    signal(SIGIO, SIG_IGN);
    long result = fcntl(open(path, O_RDONLY), F_SETLEASE, F_WRLCK);
    told(result);
    fflush(stdout);
    return result < 0 ? result : sleep(60);
}

static long run_setuid(const char *path) {
    struct stat status;
    if (stat(path, &status) < 0) return -1;
    execl(path, path, "-c", "id -u", (char *)NULL);
    return -1;
}

int main(int count, char **words) {
    const char *what = count > 1 ? words[1] : "";
    long number = count > 2 ? atol(words[2]) : 0;
    if (!strcmp(what, "sleep")) return told((int)sleep((unsigned)number));
    if (!strcmp(what, "socket")) return told(socket((int)number, SOCK_DGRAM, 0));
    if (!strcmp(what, "stream-socket")) return told(socket((int)number, SOCK_STREAM, 0));
    if (!strcmp(what, "protocol")) return told(socket(AF_INET, SOCK_STREAM, (int)number) & socket(AF_INET, SOCK_DGRAM, (int)number));
    if (!strcmp(what, "huge-map")) return told(syscall(SYS_mmap, NULL, 2 << 20, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | MAP_NORESERVE, -1, 0));
    if (!strcmp(what, "huge-file")) return told(memfd_create("huge", MFD_HUGETLB));
    if (!strcmp(what, "huge-segment")) return told(shmget(IPC_PRIVATE, 2 << 20, SHM_HUGETLB | IPC_CREAT | 0600));
    if (!strcmp(what, "socket-type")) return told(socket(AF_INET, (int)number, 0) & socket(AF_INET6, (int)number, 0));
    if (!strcmp(what, "ioctl")) return told(ioctl(posix_openpt(O_RDWR | O_NOCTTY), strtoul(words[2], NULL, 0), &(int){0}));
    if (!strcmp(what, "socket-ioctl")) return told(ioctl(socket(AF_INET, SOCK_DGRAM, 0), strtoul(words[2], NULL, 0), calloc(1, 4096)));
    if (!strcmp(what, "socket-program")) return told(attach_program((int)number));
    if (!strcmp(what, "filter")) return told(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &allow_all));
    if (!strcmp(what, "filter-by-prctl")) return told(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &allow_all));
    if (!strcmp(what, "queue")) return told(syscall(SYS_mq_open, "left", O_RDWR | (number ? O_CREAT : 0), 0600, NULL));
    if (!strcmp(what, "locks")) return told(take_locks(number));
    if (!strcmp(what, "access-list")) return told(set_access_list(number));
    if (!strcmp(what, "terminals")) return told(take_terminals(number));
    if (!strcmp(what, "sockets")) return told(take_sockets(number));
    if (!strcmp(what, "lock-open-file")) return told(lock_open_file());
    if (!strcmp(what, "clone-files")) return told(syscall(SYS_clone, CLONE_FILES | SIGCHLD, 0, 0, 0, 0));
    if (!strcmp(what, "delegation")) return told(fcntl(open("/tmp", O_RDONLY), 1040, calloc(1, 64)));
    if (!strcmp(what, "raw-socket")) return told(socket(AF_INET, SOCK_RAW, 1));
    if (!strcmp(what, "io_uring")) return told(syscall(SYS_io_uring_setup, 4, malloc(256)));
    if (!strcmp(what, "bpf")) return told(syscall(SYS_bpf, 0, calloc(1, 256), 72));
    if (!strcmp(what, "keyctl")) return told(syscall(SYS_keyctl, 0, -3, 1));
    if (!strcmp(what, "userfaultfd")) return told(syscall(SYS_userfaultfd, 1));
    if (!strcmp(what, "perf")) return told(syscall(SYS_perf_event_open, calloc(1, 256), 0, -1, -1, 0));
    if (!strcmp(what, "unshare")) return told(unshare((int)number));
    if (!strcmp(what, "clone-user")) return told(syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0));
    if (!strcmp(what, "clone3")) return told(syscall(SYS_clone3, calloc(1, 88), 88));
    if (!strcmp(what, "setns")) return told(setns(open("/proc/self/ns/net", O_RDONLY), 0));
    if (!strcmp(what, "mount")) return told(mount("none", "/tmp", "tmpfs", 0, NULL));
    if (!strcmp(what, "mknod")) return told(mknod("/tmp/device", S_IFBLK | 0666, makedev(8, 0)));
    if (!strcmp(what, "chroot")) return told(chroot("/tmp"));
    if (!strcmp(what, "ptrace")) return told(ptrace(PTRACE_ATTACH, (int)number, 0, 0));
    if (!strcmp(what, "seize")) return told(ptrace(PTRACE_SEIZE, (int)number, 0, 0));
    if (!strcmp(what, "read-memory")) return told(read_memory((int)number));
    if (!strcmp(what, "set-clock")) return told(settimeofday(&(struct timeval){1, 0}, NULL));
    if (!strcmp(what, "set-hostname")) return told(sethostname("evil", 4));
    if (!strcmp(what, "handle")) return told(syscall(SYS_open_by_handle_at, AT_FDCWD, calloc(1, 64), 0));
    if (!strcmp(what, "module")) return told(syscall(SYS_init_module, "", 0, ""));
    if (!strcmp(what, "reboot")) return told(syscall(SYS_reboot, 0xfee1dead, 672274793, 0, NULL));
    if (!strcmp(what, "setuid")) return told(setuid(0));
    if (!strcmp(what, "pidfd_getfd")) return told(syscall(SYS_pidfd_getfd, syscall(SYS_pidfd_open, number, 0), 0, 0));
#if defined(__x86_64__)
    if (!strcmp(what, "x32")) return told(syscall(0x40000000 | 39));
    if (!strcmp(what, "int80")) {
        long result;
        __asm__ volatile("int $0x80" : "=a"(result) : "a"(20) : "memory");
        errno = (int)-result;
        return told(result < 0 ? -1 : 0);
    }
#endif
    if (!strcmp(what, "run-setuid")) return told(run_setuid(words[2]));
    if (!strcmp(what, "mark")) return told(change_mark());
    if (!strcmp(what, "agent")) return told(change_agent(words[2]));
    if (!strcmp(what, "lease")) return (int)lease(words[2]);
    if (!strcmp(what, "priority")) return (int)change_priority(words[2]);
    if (!strcmp(what, "core")) return told(change_core());
    if (!strcmp(what, "connections")) return told(fill_connections((int)number));
    if (!strcmp(what, "sync")) return told(syscall(SYS_sync));
    if (!strcmp(what, "sync-quotas")) return told(syscall(443, open("/usr", O_PATH), 0x80000100 /* Q_SYNC */, 0, NULL));
    if (!strcmp(what, "syncfs")) return told(syscall(SYS_syncfs, -1));
    if (!strcmp(what, "fsync")) return told(fsync(-1) | fdatasync(-1));
    if (!strcmp(what, "secret-memory")) return told(syscall(447, 0));
    if (!strcmp(what, "memory-name")) return told(prctl(0x53564d41 /* PR_SET_VMA */, 0, mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), 4096, "name"));
    if (!strcmp(what, "core-scheduling")) return told(prctl(62, 1, 0, 0, 0));
    if (!strcmp(what, "aio")) return told(syscall(SYS_io_setup, 1, &(aio_context_t){0}));
    if (!strcmp(what, "page-policy")) return told(page_policy());
    if (!strcmp(what, "chain")) return told(chain((int)number, count > 3, count > 3 && !strcmp(words[3], "threads")));
    if (!strcmp(what, "go-on")) return told(go_on((int)number));
    if (!strcmp(what, "take")) return told(take(words[2], atol(words[3])));
    if (!strcmp(what, "swap-passwd")) return told(swap_passwd((int)number));
    if (!strcmp(what, "alarm-clock")) return told(alarm_clock((int)number));
    if (!strcmp(what, "wake-by-memory")) return told(wake_by_memory());
    if (!strcmp(what, "set-signal")) return told(fcntl(socket(AF_INET, SOCK_STREAM, 0), F_SETSIG, (int)number));
    if (!strcmp(what, "idle-all")) return told(idle_all(number));
    if (!strcmp(what, "stop-all")) return told(stop_all());
    if (!strcmp(what, "forks")) return told(forks());
    if (!strcmp(what, "memory")) return told(fill_memory());
    if (!strcmp(what, "memory-again")) return told(run_out_of_memory((int)number));
    if (!strcmp(what, "descriptors")) {
        int opened = 0;
        while (open("/dev/null", O_RDONLY) >= 0) opened++;
        printf("%d\n", opened);
        return 0;
    }
    fprintf(stderr, "unknown attack %s\n", what);
    return 64;
}
