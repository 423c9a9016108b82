/* The process tree of one command. The command's first process is a child subreaper, so whatever descends from it
 * stays below it in /proc as long as it lives, `setsid` and double forks included. */
#include "agent.h"

#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static bool read_process(pid_t pid, struct process *process) {
    char path[48], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    ssize_t got = read(fd, text, sizeof text - 1);
    close(fd);
    if (got <= 0) return false;
    text[got] = 0;
    char *after = strrchr(text, ')');
    if (!after) return false;
    int parent;
    *process = (struct process){.pid = pid};
    int fields = sscanf(after + 1,
                        " %c %d %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu",
                        &process->state, &parent, &process->started);
    process->parent = parent;
    return fields == 3;
}

static size_t read_all(struct process **all) {
    static struct process *table;
    static size_t capacity;
    size_t count = 0;
    DIR *directory = opendir("/proc");
    if (!directory) die("/proc cannot be read");
    for (struct dirent *entry; (entry = readdir(directory));) {
        if (!isdigit((unsigned char)entry->d_name[0])) continue;
        if (count == capacity) {
            capacity = capacity ? capacity * 2 : 128;
            table = realloc(table, capacity * sizeof *table);
            if (!table) die("out of memory");
        }
        if (read_process(atoi(entry->d_name), &table[count])) count++;
    }
    closedir(directory);
    *all = table;
    return count;
}

static bool holds(const struct tree *tree, const struct process *process) {
    for (size_t i = 0; i < tree->count; i++)
        if (tree->members[i].pid == process->pid && tree->members[i].started == process->started) return true;
    return false;
}

static bool holds_parent(const struct tree *tree, const struct process *process) {
    for (size_t i = 0; i < tree->count; i++)
        if (tree->members[i].pid == process->parent && tree->members[i].started <= process->started) return true;
    return false;
}

static void add(struct tree *tree, const struct process *process) {
    if (tree->count == tree->capacity) {
        tree->capacity = tree->capacity ? tree->capacity * 2 : 32;
        tree->members = realloc(tree->members, tree->capacity * sizeof *tree->members);
        if (!tree->members) die("out of memory");
    }
    tree->members[tree->count++] = *process;
}

/* Add every living descendant of `top` and of the members; forget members that are gone. */
void tree_grow(struct tree *tree, pid_t top) {
    struct process *all;
    size_t count = read_all(&all), kept = 0;
    for (size_t i = 0; i < tree->count; i++)
        for (size_t j = 0; j < count; j++)
            if (all[j].pid == tree->members[i].pid && all[j].started == tree->members[i].started) {
                tree->members[kept++] = all[j];
                break;
            }
    tree->count = kept;
    for (bool changed = true; changed;) {
        changed = false;
        for (size_t j = 0; j < count; j++) {
            if (all[j].pid == getpid() || holds(tree, &all[j])) continue;
            if (all[j].pid != top && !holds_parent(tree, &all[j])) continue;
            add(tree, &all[j]);
            changed = true;
        }
    }
}

/* Stop all of it. A process that is stopped cannot fork, so the walk ends when a pass finds nobody running. */
void tree_freeze(struct tree *tree, pid_t top) {
    for (int pass = 0; pass < 200; pass++) {
        tree_grow(tree, top);
        bool running = false;
        for (size_t i = 0; i < tree->count; i++) {
            if (strchr("TtZX", tree->members[i].state)) continue;
            running = true;
            kill(tree->members[i].pid, SIGSTOP);
        }
        if (!running) return;
    }
}

void tree_signal(const struct tree *tree, int number) {
    for (size_t i = 0; i < tree->count; i++)
        if (tree->members[i].state != 'Z') kill(tree->members[i].pid, number);
}

/* `top` goes last: until then its orphans stay below it. */
void tree_kill(struct tree *tree, pid_t top) {
    tree_freeze(tree, top);
    for (size_t i = 0; i < tree->count; i++)
        if (tree->members[i].pid != top) kill(tree->members[i].pid, SIGKILL);
    if (top > 0) kill(top, SIGKILL);
}

void tree_free(struct tree *tree) {
    free(tree->members);
    *tree = (struct tree){0};
}
