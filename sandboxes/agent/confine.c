/* A system call filter in addition to the container engine's. It covers the agent and all its children. */
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
enum { NATIVE = AUDIT_ARCH_X86_64 };
#elif defined(__aarch64__)
enum { NATIVE = AUDIT_ARCH_AARCH64 };
#else
#error "this processor is not supported"
#endif

enum { CLONE_NAMESPACES = 0x7e020000, MAX_RULES = 640 };

static const int refused[] = {
    SYS_ptrace, SYS_process_vm_readv, SYS_process_vm_writev, SYS_kcmp, SYS_pidfd_getfd,
    SYS_io_uring_setup, SYS_io_uring_enter, SYS_io_uring_register,
    SYS_io_setup, /* its contexts count against a limit of the whole machine */
    SYS_mbind, /* a policy for each page of a shared file is memory of the kernel that no limit counts */
    SYS_bpf, SYS_perf_event_open, SYS_userfaultfd, SYS_fanotify_init,
    SYS_keyctl, SYS_add_key, SYS_request_key,
    SYS_unshare, SYS_setns, SYS_mount, SYS_umount2, SYS_pivot_root, SYS_chroot, SYS_move_mount, SYS_open_tree,
    SYS_fsopen, SYS_fsmount, SYS_fsconfig, SYS_fspick, SYS_mount_setattr,
    SYS_open_by_handle_at, SYS_name_to_handle_at, SYS_quotactl, SYS_acct, SYS_swapon, SYS_swapoff, SYS_reboot,
    SYS_init_module, SYS_finit_module, SYS_delete_module, SYS_kexec_load, SYS_kexec_file_load, SYS_syslog,
    SYS_settimeofday, SYS_clock_settime, SYS_clock_adjtime, SYS_adjtimex, SYS_sethostname, SYS_setdomainname,
    SYS_sync, /* writes out all that the machine has not written yet; nothing in a sandbox lies on a disk */
    443, /* quotactl_fd (Linux 5.14): one of its commands does the same, for everybody */
    467, /* open_tree_attr (Linux 6.15) */
    SYS_lookup_dcookie, SYS_vhangup, SYS_nfsservctl, SYS_move_pages, SYS_migrate_pages,
    447, /* memfd_secret (Linux 5.14): each page splits the kernel's own map of memory, which slows the whole machine */
#if defined(__x86_64__)
    SYS_iopl, SYS_ioperm, SYS_modify_ldt, SYS_uselib, SYS_ustat, SYS_sysfs,
#endif
};

/* Nothing that code here writes lies on a disk, but files that it can read do: to write out one of those (the image, the
 * passwd file) makes the machine's disk empty its cache, as `sync` does. */
static const int writing_out[] = {SYS_syncfs, SYS_fsync, SYS_fdatasync};

/* Of btrfs, for everybody who can open a file there: they write out all that it has not written yet. */
static const int writing_ioctls[] = {0x9408 /* BTRFS_IOC_SYNC */, (int)0x80089418 /* BTRFS_IOC_START_SYNC */};

/* A command that another one makes idle before its program runs gets no processor while 40 others are busy, and the agent
 * waits for it; one that made itself idle would not even die. Within a sandbox priorities serve nothing else. */
static const int setting_priority[] = {SYS_setpriority, SYS_sched_setscheduler, SYS_sched_setparam, SYS_sched_setattr};

/* An access list of 64 KiB for each file is memory of the kernel that no limit counts: 8 GiB in the 131,072 files of a
 * sandbox. The names of attributes are out of reach of a filter; programs that copy files do without on ENOTSUP. */
static const int setting_attributes[] = {SYS_setxattr, SYS_lsetxattr, SYS_fsetxattr, 463 /* setxattrat (Linux 6.13) */};

/* Calls with a process as first argument: to change limits and scheduling of the agent, the same user is enough. */
static const int of_process[] = {
    SYS_prlimit64, SYS_sched_setaffinity, SYS_sched_setscheduler, SYS_sched_setparam, SYS_sched_setattr,
};

enum { IOPRIO_PROCESS = 1, IOPRIO_GROUP, IOPRIO_USER };

/* For each other kind of socket the kernel starts a program of the machine, as root and outside of the sandbox's limits
 * (modprobe): to load protocols that are rarely used and often vulnerable, or to find that there is no such protocol. */
static const struct { uint8_t family, type, protocol; } sockets[] = {
    {AF_INET, SOCK_STREAM, 0}, {AF_INET, SOCK_STREAM, IPPROTO_TCP},
    {AF_INET, SOCK_DGRAM, 0}, {AF_INET, SOCK_DGRAM, IPPROTO_UDP}, {AF_INET, SOCK_DGRAM, IPPROTO_ICMP},
    {AF_INET6, SOCK_STREAM, 0}, {AF_INET6, SOCK_STREAM, IPPROTO_TCP},
    {AF_INET6, SOCK_DGRAM, 0}, {AF_INET6, SOCK_DGRAM, IPPROTO_UDP}, {AF_INET6, SOCK_DGRAM, IPPROTO_ICMPV6},
};

/* Other calls for which it does so: line disciplines of a terminal, bridges, VLANs, DLCI devices. */
static const int loading_ioctls[] = {TIOCSETD, SIOCGIFBR, SIOCSIFBR, SIOCBRADDBR, SIOCBRDELBR, SIOCGIFVLAN, SIOCSIFVLAN,
                                     0x8980 /* SIOCADDDLCI */, 0x8981 /* SIOCDELDLCI */};

/* Programs on sockets use the memory for compiled filters, which the whole machine shares. If it is exhausted, no filter
 * like this one can be installed, so no command can start in any sandbox. The other options keep up to 128 KiB for each
 * socket in memory of the kernel that no limit of the sandbox counts, and with those of TCP the kernel also asks for
 * modules. Flow labels are counted over the machine as well, and outlive their sockets. As many bytes as a socket may
 * receive, it may keep of errors and time stamps, which no limit counts either: to set that number does nothing. */
enum { FLOW_LABELS = 32, ADD_AUTHENTICATION_KEY = 38 }; /* IPV6_FLOWLABEL_MGR, TCP_AO_ADD_KEY (Linux 6.7) */
static const struct { int level, option, seems_done; } refused_options[] = {
    {SOL_SOCKET, SO_RCVBUF, 1},
    {SOL_SOCKET, SO_ATTACH_FILTER}, {SOL_SOCKET, SO_ATTACH_BPF},
    {SOL_SOCKET, SO_ATTACH_REUSEPORT_CBPF}, {SOL_SOCKET, SO_ATTACH_REUSEPORT_EBPF},
    {IPPROTO_IP, IP_ADD_MEMBERSHIP}, {IPPROTO_IP, IP_ADD_SOURCE_MEMBERSHIP},
    {IPPROTO_IP, MCAST_JOIN_GROUP}, {IPPROTO_IP, MCAST_JOIN_SOURCE_GROUP},
    {IPPROTO_IPV6, IPV6_JOIN_GROUP}, {IPPROTO_IPV6, MCAST_JOIN_GROUP}, {IPPROTO_IPV6, MCAST_JOIN_SOURCE_GROUP},
    {IPPROTO_IPV6, IPV6_2292PKTOPTIONS}, {IPPROTO_IPV6, FLOW_LABELS}, {IPPROTO_IPV6, IPV6_RTHDR},
    {IPPROTO_IPV6, IPV6_HOPOPTS}, {IPPROTO_IPV6, IPV6_RTHDRDSTOPTS}, {IPPROTO_IPV6, IPV6_DSTOPTS},
    {IPPROTO_TCP, TCP_ULP}, {IPPROTO_TCP, TCP_MD5SIG}, {IPPROTO_TCP, TCP_MD5SIG_EXT},
    {IPPROTO_TCP, ADD_AUTHENTICATION_KEY},
};

enum { SET_DELEGATION = 1040 }; /* F_SETDELEG (Linux 6.19): a lease on a folder */
enum { SCHED_CORE = 62 };       /* PR_SCHED_CORE: whoever has a cookie leaves the core's other thread idle for all others */
/* PR_SET_VMA (Linux 5.17): a name for each mapping is memory of the kernel that no limit counts, 96 bytes for each of
 * 65,530 mappings of a process */
enum { NAMES_OF_MEMORY = 0x53564d41 };

static struct sock_filter rules[MAX_RULES];
static unsigned short rule_count;

static void rule(unsigned short code, uint32_t value, unsigned char when_true, unsigned char when_false) {
    if (rule_count == MAX_RULES) die("too many filter rules");
    rules[rule_count++] = (struct sock_filter){code, when_true, when_false, value};
}

static void load(size_t offset) { rule(BPF_LD | BPF_W | BPF_ABS, (uint32_t)offset, 0, 0); }
static void give(uint32_t verdict) { rule(BPF_RET | BPF_K, verdict, 0, 0); }
static void if_equal(uint32_t value, unsigned char skip_otherwise) { rule(BPF_JMP | BPF_JEQ | BPF_K, value, 0, skip_otherwise); }

static uint32_t fail_with(int error) { return SECCOMP_RET_ERRNO | (uint32_t)error; }

static void refuse_all(const int *calls, size_t count, int error) {
    for (size_t i = 0; i < count; i++) {
        if_equal((uint32_t)calls[i], 1);
        give(fail_with(error));
    }
}

#define REFUSE_ALL(calls, error) refuse_all(calls, sizeof calls / sizeof *calls, error)

static void refuse_with(int call, int argument, uint32_t value) {
    if_equal((uint32_t)call, 4);
    load(offsetof(struct seccomp_data, args[argument]));
    if_equal(value, 1);
    give(fail_with(EPERM));
    load(offsetof(struct seccomp_data, nr));
}

static void refuse_with_any_of(int call, int argument, uint32_t bits) {
    if_equal((uint32_t)call, 4);
    load(offsetof(struct seccomp_data, args[argument]));
    rule(BPF_JMP | BPF_JSET | BPF_K, bits, 0, 1);
    give(fail_with(EPERM));
    load(offsetof(struct seccomp_data, nr));
}

/* The machine's reserve of huge pages, which no memory limit covers. */
static void refuse_huge_pages(void) {
    refuse_with_any_of(SYS_mmap, 3, MAP_HUGETLB);
    refuse_with_any_of(SYS_memfd_create, 1, MFD_HUGETLB);
    refuse_with_any_of(SYS_shmget, 2, SHM_HUGETLB);
}

/* Refuses `call` if the argument and the next one have these values. */
static void refuse_with_both(int call, int argument, uint32_t first, uint32_t second) {
    if_equal((uint32_t)call, 6);
    load(offsetof(struct seccomp_data, args[argument]));
    if_equal(first, 3);
    load(offsetof(struct seccomp_data, args[argument + 1]));
    if_equal(second, 1);
    give(fail_with(EPERM));
    load(offsetof(struct seccomp_data, nr));
}

static void refuse_foreign_calls(void) {
    load(offsetof(struct seccomp_data, arch));
    rule(BPF_JMP | BPF_JEQ | BPF_K, NATIVE, 1, 0);
    give(fail_with(ENOSYS));
    load(offsetof(struct seccomp_data, nr));
#if defined(__x86_64__)
    rule(BPF_JMP | BPF_JGE | BPF_K, 0x40000000, 0, 1); /* x32 numbers of the same calls */
    give(fail_with(ENOSYS));
#endif
}

/* The rules up to end_if apply if the loaded value equals this one. */
static unsigned short begin_if(uint32_t value) {
    if_equal(value, 0);
    return rule_count;
}

static void end_if(unsigned short begin) { rules[begin - 1].jf = (unsigned char)(rule_count - begin); }

/* Compares type (without its flags) and protocol as one word. */
static void allow_sockets_of(uint8_t family) {
    unsigned short begin = begin_if(family);
    load(offsetof(struct seccomp_data, args[1]));
    rule(BPF_ALU | BPF_AND | BPF_K, 0xf, 0, 0);
    rule(BPF_ALU | BPF_LSH | BPF_K, 8, 0, 0);
    rule(BPF_MISC | BPF_TAX, 0, 0, 0);
    load(offsetof(struct seccomp_data, args[2]));
    rule(BPF_JMP | BPF_JGT | BPF_K, 0xff, 0, 1);
    give(fail_with(EPROTONOSUPPORT));
    rule(BPF_ALU | BPF_OR | BPF_X, 0, 0, 0);
    for (size_t i = 0; i < sizeof sockets / sizeof *sockets; i++) {
        if (sockets[i].family != family) continue;
        if_equal((uint32_t)sockets[i].type << 8 | sockets[i].protocol, 1);
        give(SECCOMP_RET_ALLOW);
    }
    give(fail_with(EPROTONOSUPPORT));
    end_if(begin);
}

static void limit_sockets(int call) {
    unsigned short begin = begin_if((uint32_t)call);
    load(offsetof(struct seccomp_data, args[0]));
    if_equal(AF_UNIX, 1);
    give(SECCOMP_RET_ALLOW);
    allow_sockets_of(AF_INET);
    allow_sockets_of(AF_INET6);
    give(fail_with(EAFNOSUPPORT));
    end_if(begin);
}

static void limit_socket_options(void) {
    unsigned short begin = begin_if(SYS_setsockopt);
    for (size_t i = 0; i < sizeof refused_options / sizeof *refused_options; i++) {
        load(offsetof(struct seccomp_data, args[1]));
        if_equal((uint32_t)refused_options[i].level, 3);
        load(offsetof(struct seccomp_data, args[2]));
        if_equal((uint32_t)refused_options[i].option, 1);
        give(fail_with(refused_options[i].seems_done ? 0 : EPERM));
    }
    give(SECCOMP_RET_ALLOW);
    end_if(begin);
}

/* Refuses new namespaces. The flags of clone3 are in memory, out of reach of a filter: ENOSYS makes the C library fall
 * back to clone. */
static void refuse_namespaces(void) {
    if_equal(SYS_clone3, 1);
    give(fail_with(ENOSYS));
    unsigned short begin = begin_if(SYS_clone);
    load(offsetof(struct seccomp_data, args[0]));
    rule(BPF_JMP | BPF_JSET | BPF_K, CLONE_NAMESPACES, 0, 1);
    give(fail_with(EPERM));
    rule(BPF_ALU | BPF_AND | BPF_K, CLONE_FILES | CLONE_THREAD, 0, 0);
    if_equal(CLONE_FILES, 1); /* locks of a process that ends would stay with another one: members.c counts them */
    give(fail_with(EPERM));
    give(SECCOMP_RET_ALLOW);
    end_if(begin);
}

/* New commands inherit the agent's limits and priorities, and a changed limit could end the agent. */
static void keep_agent_as_it_is(void) {
    const uint32_t agent = (uint32_t)getpid();
    for (size_t i = 0; i < sizeof of_process / sizeof *of_process; i++) refuse_with(of_process[i], 0, agent);
    refuse_with_both(SYS_setpriority, 0, PRIO_PROCESS, agent);
    refuse_with_both(SYS_setpriority, 0, PRIO_PGRP, agent);
    refuse_with(SYS_setpriority, 0, PRIO_USER);
    refuse_with_both(SYS_ioprio_set, 0, IOPRIO_PROCESS, agent);
    refuse_with_both(SYS_ioprio_set, 0, IOPRIO_GROUP, agent);
    refuse_with(SYS_ioprio_set, 0, IOPRIO_USER);
}

/* True for root of the machine itself, whose services need what it has. */
static bool is_host_root(void) {
    unsigned int inside, outside, count;
    FILE *map = geteuid() == 0 ? fopen("/proc/self/uid_map", "re") : NULL;
    if (!map) return false;
    bool same = fscanf(map, "%u %u %u", &inside, &outside, &count) == 3 && inside == outside;
    fclose(map);
    return same;
}

/* What the kernel counts per user: root of a sandbox would take it from the machine's root and from other sandboxes. */
static void refuse_what_root_shares(void) {
    if_equal(SYS_mq_open, 1);
    give(fail_with(EMFILE));
#if defined(__x86_64__)
    if_equal(SYS_inotify_init, 1);
    give(fail_with(EMFILE));
#endif
    if_equal(SYS_inotify_init1, 1);
    give(fail_with(EMFILE));
}

void confine(void) {
    refuse_foreign_calls();
    REFUSE_ALL(refused, EPERM);
    REFUSE_ALL(setting_attributes, ENOTSUP);
    REFUSE_ALL(writing_out, 0); /* programs take a failure for lost data */
    keep_agent_as_it_is();
    REFUSE_ALL(setting_priority, 0); /* of all but the agent: a failure would end programs that only want to be polite */
    refuse_with(SYS_prctl, 0, SCHED_CORE);
    refuse_with(SYS_prctl, 0, NAMES_OF_MEMORY);
    refuse_with(SYS_fcntl, 1, F_SETLEASE); /* an open of a leased file blocks: the agent would block for 45 s */
    refuse_with(SYS_fcntl, 1, SET_DELEGATION);
    refuse_with(SYS_fcntl, 1, F_OFD_SETLK); /* members.c counts locks by their processes */
    refuse_with(SYS_fcntl, 1, F_OFD_SETLKW);
    refuse_with_both(SYS_fcntl, 1, F_SETSIG, SIGCONT); /* a socket could send it to a stopped process: see members.c */
    refuse_with_both(SYS_fcntl, 1, F_SETSIG, SIGKILL);
    for (size_t i = 0; i < sizeof loading_ioctls / sizeof *loading_ioctls; i++) refuse_with(SYS_ioctl, 1, (uint32_t)loading_ioctls[i]);
    for (size_t i = 0; i < sizeof writing_ioctls / sizeof *writing_ioctls; i++) refuse_with(SYS_ioctl, 1, (uint32_t)writing_ioctls[i]);
    if (is_host_root()) refuse_what_root_shares();
    refuse_huge_pages();
    limit_sockets(SYS_socket);
    limit_sockets(SYS_socketpair);
    limit_socket_options();
    refuse_namespaces();
    give(SECCOMP_RET_ALLOW);
    struct sock_fprog program = {rule_count, rules};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) < 0)
        die("the system call filter cannot be installed");
}
