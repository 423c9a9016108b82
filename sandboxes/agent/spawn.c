/* Start one command: pipes, environment, working directory, its own session, and its mark. */
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { NUDGE_MS = 10, MAX_STOPS = 20 };

extern char **environ;

static char **take_strings(struct reader *payload, uint32_t count) {
    if (count > payload->left / 4) {
        payload->bad = true;
        return NULL;
    }
    char **strings = calloc((size_t)count + 1, sizeof *strings);
    if (!strings) die("out of memory");
    for (uint32_t i = 0; i < count; i++) strings[i] = take_string(payload);
    return strings;
}

static void free_strings(char **strings) {
    if (!strings) return;
    for (char **at = strings; *at; at++) free(*at);
    free(strings);
}

bool request_take(struct request *request, struct reader *payload) {
    *request = (struct request){0};
    request->timeout_ms = take_u32(payload);
    request->grace_ms = take_u32(payload);
    request->cap = take_u32(payload);
    request->window = take_u32(payload);
    request->flags = take_u32(payload);
    uint32_t words = take_u32(payload), settings = take_u32(payload);
    request->directory = take_string(payload);
    request->words = take_strings(payload, words);
    if (!payload->bad) request->settings = take_strings(payload, settings);
    return !payload->bad && words > 0 && request->cap <= MAX_CAP;
}

void request_free(struct request *request) {
    free(request->directory);
    free_strings(request->words);
    free_strings(request->settings);
}

static bool same_name(const char *left, const char *right) {
    size_t length = strcspn(left, "=");
    return strncmp(left, right, length) == 0 && right[length] == '=';
}

/* Merges the agent's environment with the request's settings, which take precedence; the strings are not copied. */
static char **environment(char **settings) {
    size_t inherited = 0, own = 0, count = 0;
    while (environ[inherited]) inherited++;
    while (settings[own]) own++;
    char **merged = calloc(inherited + own + 1, sizeof *merged);
    if (!merged) die("out of memory");
    for (size_t i = 0; i < inherited; i++) {
        bool replaced = false;
        for (size_t j = 0; j < own; j++) replaced |= same_name(environ[i], settings[j]);
        if (!replaced) merged[count++] = environ[i];
    }
    for (size_t j = 0; j < own; j++) merged[count++] = settings[j];
    return merged;
}

static int run_in(const char *directory, const char *program, char **words, char **variables) {
    if (chdir(directory) < 0) return errno;
    execve(program, words, variables);
    return errno;
}

static int search_and_run(const struct request *request, char **variables) {
    const char *name = request->words[0], *search = "/usr/local/bin:/usr/bin:/bin";
    if (strchr(name, '/')) return run_in(request->directory, name, request->words, variables);
    for (char **at = variables; *at; at++)
        if (strncmp(*at, "PATH=", 5) == 0) search = *at + 5;
    int error = ENOENT;
    while (true) {
        char path[4096];
        int length = (int)strcspn(search, ":");
        int used = snprintf(path, sizeof path, "%.*s/%s", length, search, name);
        if (length > 0 && used < (int)sizeof path) {
            int why = run_in(request->directory, path, request->words, variables);
            if (why != ENOENT && why != ENOTDIR) error = why;
        }
        if (!search[length]) return error;
        search += length + 1;
    }
}

/* Runs in the child. */
static int become(const struct request *request, const int fds[3], uint64_t number, char **variables) {
    sigset_t none;
    sigemptyset(&none);
    setsid();
    if (!members_mark(number)) return errno;
    for (int fd = 0; fd < 3; fd++)
        if (dup2(fds[fd], fd) < 0) return errno;
    int score = members_open("self/oom_score_adj", O_WRONLY);
    if (score >= 0) {
        if (write(score, "500", 3) < 0) close(score);
        else close(score);
    }
    signal(SIGPIPE, SIG_DFL);
    sigprocmask(SIG_SETMASK, &none, NULL);
    if (chdir(request->directory) < 0) return -errno;
    return search_and_run(request, variables);
}

/* Returns the error that the child reports, or 0 once its program runs. Code inside may stop the child before that;
 * after MAX_STOPS stops it is killed and ends like after any SIGKILL. */
static int outcome(int told, pid_t pid) {
    struct pollfd entry = {told, POLLIN, 0};
    for (int stops = 0; poll(&entry, 1, NUDGE_MS) <= 0;)
        if (members_is_stopped(pid)) kill(pid, ++stops < MAX_STOPS ? SIGCONT : SIGKILL);
    int why;
    return read(told, &why, sizeof why) == (ssize_t)sizeof why ? why : 0;
}

/* Returns the process id, or 0 with `error` set (negative: the working directory failed). No vfork: a child that is
 * stopped before its exec would block the agent forever. */
pid_t spawn(const struct request *request, const int fds[3], uint64_t number, int *error) {
    int told[2];
    if (pipe2(told, O_CLOEXEC) < 0) {
        *error = errno;
        return 0;
    }
    char **variables = environment(request->settings);
    pid_t pid = fork();
    if (pid == 0) {
        int why = become(request, fds, number, variables);
        _exit(write(told[1], &why, sizeof why) < 0 ? 126 : 127);
    }
    *error = pid < 0 ? errno : 0;
    free(variables);
    close(told[1]);
    if (pid > 0) *error = outcome(told[0], pid);
    close(told[0]);
    return *error ? 0 : pid;
}
