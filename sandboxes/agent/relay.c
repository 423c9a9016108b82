/* `agent --relay PORT`: connections to 127.0.0.1:PORT inside become channels on stdin and stdout. What may be reached is
 * decided by the controller at the other end; the sandbox itself has no network. */
#include "agent.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MOST = 64, PENDING = 1 << 20, ACCEPTED = 1 };

struct joined {
    int fd;
    uint32_t channel;
    unsigned char *pending;
    size_t used;
    bool read_ended, write_ends;
};

static struct joined joined[MOST];
static size_t count;

static void drop(size_t index) {
    close(joined[index].fd);
    free(joined[index].pending);
    joined[index] = joined[--count];
}

static int listen_on(uint16_t port) {
    struct sockaddr_in where = {.sin_family = AF_INET, .sin_port = htons(port)};
    where.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), yes = 1;
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) < 0 ||
        bind(fd, (struct sockaddr *)&where, sizeof where) < 0 || listen(fd, MOST) < 0)
        die("the relay cannot listen");
    return fd;
}

static void take(int listener) {
    static uint32_t last;
    int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) return;
    joined[count++] = (struct joined){.fd = fd, .channel = ++last};
    wire_send(ACCEPTED, last, NULL, 0);
}

/* Returns false if the connection is over. */
static bool write_pending(struct joined *one) {
    size_t sent = 0;
    while (sent < one->used) {
        ssize_t took = write(one->fd, one->pending + sent, one->used - sent);
        if (took < 0 && errno == EAGAIN) break;
        if (took < 0) return false;
        sent += (size_t)took;
    }
    memmove(one->pending, one->pending + sent, one->used - sent);
    one->used -= sent;
    if (one->write_ends && one->used == 0) shutdown(one->fd, SHUT_WR);
    return !(one->write_ends && one->used == 0 && one->read_ended);
}

static bool read_some(struct joined *one) {
    static unsigned char scratch[CHUNK];
    ssize_t got = read(one->fd, scratch, sizeof scratch);
    if (got < 0) return errno == EAGAIN;
    if (got > 0) {
        wire_send(DATA, one->channel, scratch, (size_t)got);
        return true;
    }
    one->read_ended = true;
    wire_send(END, one->channel, NULL, 0);
    return !(one->write_ends && one->used == 0);
}

static void receive(uint8_t type, uint32_t channel, const struct reader *payload) {
    size_t index = 0;
    while (index < count && joined[index].channel != channel) index++;
    if (index == count) return;
    struct joined *one = &joined[index];
    if (type == CANCEL || one->used + payload->left > PENDING) {
        wire_send(END, channel, NULL, 0);
        drop(index);
        return;
    }
    if (type == DATA && payload->left) {
        if (!one->pending && !(one->pending = malloc(PENDING))) die("out of memory");
        memcpy(one->pending + one->used, payload->at, payload->left);
        one->used += payload->left;
    }
    if (type == END) one->write_ends = true;
    if (!write_pending(one)) {
        if (!one->read_ended) wire_send(END, channel, NULL, 0);
        drop(index);
    }
}

static void serve(const struct pollfd *entries, size_t polled) {
    for (size_t i = polled; i-- > 0;) {
        bool lives = true;
        if (entries[i].revents & POLLOUT) lives = write_pending(&joined[i]);
        if (lives && entries[i].revents & (POLLIN | POLLHUP | POLLERR)) lives = read_some(&joined[i]);
        if (lives) continue;
        if (!joined[i].read_ended) wire_send(END, joined[i].channel, NULL, 0);
        drop(i);
    }
}

void relay(uint16_t port) {
    signal(SIGPIPE, SIG_IGN);
    prctl(PR_SET_DUMPABLE, 0);
    int listener = listen_on(port);
    wire_start();
    wire_send(READY, 0, NULL, 0);
    for (;;) {
        struct pollfd entries[3 + MOST];
        bool may_read = wire_backlog() <= OUTPUT_SOFT_LIMIT;
        entries[0] = (struct pollfd){0, POLLIN, 0};
        entries[1] = (struct pollfd){wire_backlog() ? 1 : -1, POLLOUT, 0};
        entries[2] = (struct pollfd){count < MOST ? listener : -1, POLLIN, 0};
        for (size_t i = 0; i < count; i++) {
            short wanted = (short)((may_read && !joined[i].read_ended ? POLLIN : 0) | (joined[i].used ? POLLOUT : 0));
            entries[3 + i] = (struct pollfd){wanted ? joined[i].fd : -1, wanted, 0};
        }
        size_t polled = count;
        if (poll(entries, 3 + polled, -1) < 0 && errno != EINTR) die("poll failed");
        serve(entries + 3, polled);
        if (entries[2].revents) take(listener);
        if (entries[0].revents) {
            uint8_t type;
            uint32_t channel;
            struct reader payload;
            wire_read();
            while (wire_next(&type, &channel, &payload)) receive(type, channel, &payload);
        }
        wire_flush();
    }
}
