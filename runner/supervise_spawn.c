/* supervise_spawn: segment and processes of one launch.
 *
 * posix_spawn, never a bare fork: the runner holds an LMDB environment, which must not cross one, and may hold locks. All
 * descriptors of this program are close-on-exec; the file actions give the rank its two by number, and everything above
 * them is closed once more in the child, so that not even a descriptor of a careless library (or the state's lock) gets
 * through. The child's ends are first moved above the numbers they will have there, so that placing one cannot overwrite
 * the other. Standard output belongs to the runner's answers: a rank gets standard error in its place.
 *
 * The runner blocks TERM and INT to read them from a descriptor; a rank must not start that way, so mask and dispositions
 * are reset. The segment is sealed against resizing: a rank gone wrong cannot shrink it and kill the runner by SIGBUS. */
#define _GNU_SOURCE
#include "supervise_spawn.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

enum { FIRST_FREE_FD = RANK_SEGMENT_FD + 1, REAP_TURN_US = 1000, REAP_TURNS = 10000 };

static enum rc seal_and_map(struct spawn_segment *s, struct err *e)
{
    if (ftruncate(s->fd, (off_t)s->bytes) || fcntl(s->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL))
        return err_errno(e, RC_FAILED, EXIT_UNAVAILABLE, "no_segment", "cannot size a shared segment of %zu bytes",
                         s->bytes);
    void *map = mmap(NULL, s->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, s->fd, 0);
    if (map == MAP_FAILED)
        return err_errno(e, RC_FAILED, EXIT_UNAVAILABLE, "no_segment", "cannot map a shared segment of %zu bytes", s->bytes);
    s->map = map;
    return RC_OK;
}

enum rc spawn_segment_open(int ranks, size_t comm_bytes, const struct lockstep_bounds *b, struct spawn_segment *out,
                           struct err *e)
{
    *out = (struct spawn_segment){.fd = -1, .bytes = segment_bytes(ranks, comm_bytes)};
    int fd = memfd_create("tandem-segment", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) return err_errno(e, RC_FAILED, EXIT_UNAVAILABLE, "no_segment", "cannot create a shared segment");
    out->fd = fcntl(fd, F_DUPFD_CLOEXEC, FIRST_FREE_FD);
    close(fd);
    enum rc rc = out->fd < 0 ? err_errno(e, RC_FAILED, EXIT_UNAVAILABLE, "no_segment", "cannot keep a shared segment")
                             : seal_and_map(out, e);
    if (rc == RC_OK) {
        segment_init(out->map, ranks, comm_bytes, b);
        out->segment = segment_attach(out->map, out->bytes, ranks, e);
        if (!out->segment) rc = RC_FAILED;
    }
    if (rc != RC_OK) spawn_segment_close(out);
    return rc;
}

void spawn_segment_close(struct spawn_segment *s)
{
    if (s->map) munmap(s->map, s->bytes);
    if (s->fd >= 0) close(s->fd);
    *s = (struct spawn_segment){.fd = -1};
}

static int fill_actions(posix_spawn_file_actions_t *f, int socket_fd, int segment_fd)
{
    int failed = posix_spawn_file_actions_addopen(f, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    if (!failed) failed = posix_spawn_file_actions_adddup2(f, STDERR_FILENO, STDOUT_FILENO);
    if (!failed) failed = posix_spawn_file_actions_adddup2(f, socket_fd, RANK_SOCKET_FD);
    if (!failed) failed = posix_spawn_file_actions_adddup2(f, segment_fd, RANK_SEGMENT_FD);
    if (!failed) failed = posix_spawn_file_actions_addclosefrom_np(f, FIRST_FREE_FD);
    return failed;
}

static int fill_attributes(posix_spawnattr_t *a)
{
    sigset_t none, all;
    sigemptyset(&none);
    sigfillset(&all);
    short flags = POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF;
    int failed = posix_spawnattr_setflags(a, flags);
    if (!failed) failed = posix_spawnattr_setpgroup(a, 0);
    if (!failed) failed = posix_spawnattr_setsigmask(a, &none);
    if (!failed) failed = posix_spawnattr_setsigdefault(a, &all);
    return failed;
}

/* The runner's environment without OpenMP's variables: nobody configures a rank from outside. A thread that waits for its
 * team soon sleeps (by default it spins for milliseconds, which on a machine with other work costs more than half the
 * speed). The array is the caller's to free, its strings are not. */
static char **rank_environment(void)
{
    static char spin[] = "GOMP_SPINCOUNT=1000";
    size_t n = 0, kept = 0;
    while (environ[n]) n++;
    char **out = calloc(n + 2, sizeof *out);
    if (!out) return NULL;
    for (size_t i = 0; i < n; i++)
        if (strncmp(environ[i], "OMP_", 4) && strncmp(environ[i], "GOMP_", 5)) out[kept++] = environ[i];
    out[kept] = spin;
    return out;
}

static int spawn_process(char *const *argv, int socket_fd, int segment_fd, pid_t *pid)
{
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    char **environment = rank_environment();
    if (!environment) return ENOMEM;
    int failed = posix_spawn_file_actions_init(&actions);
    if (failed) goto free_environment;
    failed = posix_spawnattr_init(&attributes);
    if (!failed) {
        failed = fill_actions(&actions, socket_fd, segment_fd);
        if (!failed) failed = fill_attributes(&attributes);
        if (!failed) failed = posix_spawn(pid, "/proc/self/exe", &actions, &attributes, argv, environment);
        posix_spawnattr_destroy(&attributes);
    }
    posix_spawn_file_actions_destroy(&actions);
free_environment:
    free(environment);
    return failed;
}

/* Two connected ends, both above the numbers that mean something in the rank. */
static enum rc open_sockets(int out[2], struct err *e)
{
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair))
        return err_errno(e, RC_FAILED, EXIT_UNAVAILABLE, "no_socket", "cannot create a socket pair");
    for (int i = 0; i < 2; i++) out[i] = fcntl(pair[i], F_DUPFD_CLOEXEC, FIRST_FREE_FD);
    int saved = errno;
    close(pair[0]);
    close(pair[1]);
    if (out[0] >= 0 && out[1] >= 0) return RC_OK;
    if (out[0] >= 0) close(out[0]);
    if (out[1] >= 0) close(out[1]);
    errno = saved;
    return err_errno(e, RC_FAILED, EXIT_UNAVAILABLE, "no_socket", "cannot keep a socket pair");
}

enum rc spawn_rank(const struct rank_args *a, const struct spawn_segment *s, pid_t *pid, int *socket_fd, struct err *e)
{
    struct rank_argv v;
    int ends[2] = {-1, -1};
    enum rc rc = rank_args_write(a, &v, e);
    if (rc == RC_OK) rc = open_sockets(ends, e);
    if (rc != RC_OK) goto free_argv;
    int failed = spawn_process(v.argv, ends[1], s->fd, pid);
    close(ends[1]);
    if (failed) {
        close(ends[0]);
        errno = failed;
        rc = err_errno(e, RC_FAILED, EXIT_UNAVAILABLE, "no_process", "cannot start rank %d", a->rank);
    } else {
        *socket_fd = ends[0];
    }
free_argv:
    rank_argv_free(&v);
    return rc;
}

enum rc spawn_reap(pid_t pid, int *status)
{
    pid_t ended;
    do ended = waitpid(pid, status, WNOHANG);
    while (ended < 0 && errno == EINTR);
    if (ended == 0) return RC_RETRY;
    if (ended < 0) *status = 0; /* not ours any more: gone */
    return RC_OK;
}

void spawn_kill(pid_t pid, int *status)
{
    if (kill(-pid, SIGKILL)) kill(pid, SIGKILL);
    for (int i = 0; i < REAP_TURNS; i++) {
        if (spawn_reap(pid, status) == RC_OK) return;
        sleep_us(REAP_TURN_US);
    }
    log_line(LOG_WARN, "process %d does not die: it hangs in the kernel", (int)pid);
}
