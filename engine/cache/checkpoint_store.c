/* checkpoint_store: a batch in one buffer, a thread that writes it.
 *
 *   KEY.rN.pages    whole pages one after the other, nothing else; written at their offsets, never twice with other bytes
 *   KEY.rN.a, .b    a point: header | XXH3-64 of each page | rest
 *
 * A point replaces the one of the lower position in place: a write that was cut short fails its checksum, and the other one is
 * whole. Who owns what: while a batch is being written the thread owns all checkpoints' descriptors, hashes and positions; at any
 * other time the caller does. The mutex hands them over. */
#define _GNU_SOURCE
#include "checkpoint_store.h"

#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

static const uint64_t point_magic = UINT64_C(0x31544e4f50444e54); /* "TNDPONT1" */
enum { POINT_VERSION = 1, MOST_PAGES = 1 << 24, HEX_BYTES = 2 * CHECKPOINT_KEY_BYTES, NAME_BYTES = HEX_BYTES + 16 };

static const char *const suffixes[] = {"a", "b", "pages"};
enum { PAGES = CHECKPOINT_POINTS, FILES };

/* Stored as is: fixed sizes, no padding. */
struct point_header {
    uint64_t magic;
    uint32_t version, rank;
    struct prefix_key fingerprint;
    unsigned char key[CHECKPOINT_KEY_BYTES];
    uint32_t position, n_pages;
    uint64_t page_bytes, rest_bytes;
    uint64_t checksum; /* XXH3-64 of the header with 0 here, of the hashes, of the rest; each the seed of the next */
};
static_assert(sizeof(struct point_header) == 96, "no padding");

struct checkpoint {
    struct checkpoint_store *store;
    struct checkpoint *next_closed;
    unsigned char key[CHECKPOINT_KEY_BYTES];
    int fd[FILES]; /* -1: not there, or not open yet */
    int position[CHECKPOINT_POINTS]; /* 0: no point */
    uint64_t *hashes; /* of saved pages */
    int n_pages, cap_pages;
};

/* One write of a batch. */
struct batch_item {
    struct checkpoint *checkpoint;
    size_t at, n_bytes; /* in the batch's bytes */
    int page;           /* -1: a point */
    int position;
};

struct checkpoint_store {
    struct checkpoint_store_options o;
    char *folder;
    int folder_fd;
    char *bytes; /* of the batch */
    size_t n_bytes, cap_bytes;
    struct batch_item *items;
    size_t n_items, cap_items;
    bool new_names; /* the folder has to be made durable too */
    struct checkpoint *closed; /* but perhaps in the batch that is being written */
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    /* Under the mutex. */
    bool writing, leaving;
    struct err failure;
    int64_t write_us;
};

/* ---- names and errors ---- */

static void name_of(const unsigned char key[CHECKPOINT_KEY_BYTES], int rank, int file, char out[NAME_BYTES])
{
    for (int i = 0; i < CHECKPOINT_KEY_BYTES; i++) snprintf(out + 2 * i, 3, "%02x", key[i]);
    snprintf(out + HEX_BYTES, NAME_BYTES - HEX_BYTES, ".r%d.%s", rank, suffixes[file]);
}

/* name: in the folder; "": the folder. */
static enum rc io_error(const struct checkpoint_store *s, const char *name, struct err *e)
{
    const bool full = errno == ENOSPC || errno == EDQUOT;
    return err_errno(e, RC_FAILED, EXIT_IO, full ? "checkpoint_disk_full" : "checkpoint_io", "cannot write the checkpoint %s%s%s", s->folder,
                     *name ? "/" : "", name);
}

static enum rc file_error(const struct checkpoint *c, int file, struct err *e)
{
    char name[NAME_BYTES];
    name_of(c->key, c->store->o.rank, file, name);
    return io_error(c->store, name, e);
}

/* ---- files ---- */

static bool write_at(int fd, const void *bytes, size_t n, off_t at)
{
    for (const char *from = bytes; n;) {
        ssize_t done = pwrite(fd, from, n, at);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) return false;
        from += done;
        at += done;
        n -= (size_t)done;
    }
    return true;
}

static bool read_at(int fd, void *bytes, size_t n, off_t at)
{
    for (char *to = bytes; n;) {
        ssize_t done = pread(fd, to, n, at);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return false;
        to += done;
        at += done;
        n -= (size_t)done;
    }
    return true;
}

/* Opens what is there; with create, makes what is missing. False with errno set: it could not be made. */
static bool open_file(struct checkpoint *c, int file, bool create)
{
    char name[NAME_BYTES];
    struct stat st;
    if (c->fd[file] >= 0) return true;
    name_of(c->key, c->store->o.rank, file, name);
    const int fd = openat(c->store->folder_fd, name, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | (create ? O_CREAT : 0), 0600);
    if (fd < 0) return false;
    if (fstat(fd, &st) || !S_ISREG(st.st_mode)) {
        close(fd);
        errno = EINVAL;
        return false;
    }
    c->fd[file] = fd;
    if (create) c->store->new_names = true; /* the caller's, as no batch is being written */
    return true;
}

static uint64_t checksum_of(struct point_header h, const uint64_t *hashes, const void *rest)
{
    h.checksum = 0;
    uint64_t sum = XXH3_64bits(&h, sizeof h);
    sum = XXH3_64bits_withSeed(hashes, h.n_pages * sizeof *hashes, sum);
    return XXH3_64bits_withSeed(rest, h.rest_bytes, sum);
}

static struct point_header header_of(const struct checkpoint *c, int position, size_t rest_bytes)
{
    struct point_header h = {
        .magic = point_magic,
        .version = POINT_VERSION,
        .rank = (uint32_t)c->store->o.rank,
        .fingerprint = c->store->o.fingerprint,
        .position = (uint32_t)position,
        .n_pages = (uint32_t)(c->store->o.page_bytes ? position / PREFIX_BLOCK_TOKENS : 0),
        .page_bytes = c->store->o.page_bytes,
        .rest_bytes = rest_bytes,
    };
    memcpy(h.key, c->key, sizeof h.key);
    return h;
}

/* Reads a point's header. False: there is none that is this checkpoint's. */
static bool read_header(const struct checkpoint *c, int file, struct point_header *out)
{
    if (c->fd[file] < 0 || !read_at(c->fd[file], out, sizeof *out, 0)) return false;
    if (!out->position || out->position / PREFIX_BLOCK_TOKENS > MOST_PAGES) return false;
    struct point_header own = header_of(c, (int)out->position, out->rest_bytes);
    own.checksum = out->checksum;
    return !memcmp(&own, out, sizeof own);
}

/* ---- writing, in the store's thread ---- */

static bool write_page(struct checkpoint_store *s, const struct batch_item *i)
{
    struct checkpoint *c = i->checkpoint;
    c->hashes[i->page] = XXH3_64bits(s->bytes + i->at, i->n_bytes);
    return write_at(c->fd[PAGES], s->bytes + i->at, i->n_bytes, (off_t)i->page * (off_t)i->n_bytes);
}

static bool write_point(struct checkpoint_store *s, const struct batch_item *i, int file)
{
    struct checkpoint *c = i->checkpoint;
    struct point_header h = header_of(c, i->position, i->n_bytes);
    const size_t hash_bytes = h.n_pages * sizeof *c->hashes;
    h.checksum = checksum_of(h, c->hashes, s->bytes + i->at);
    c->position[file] = 0;
    const int fd = c->fd[file];
    if (!write_at(fd, &h, sizeof h, 0) || !write_at(fd, c->hashes, hash_bytes, sizeof h)) return false;
    if (!write_at(fd, s->bytes + i->at, i->n_bytes, (off_t)(sizeof h + hash_bytes))) return false;
    if (ftruncate(fd, (off_t)(sizeof h + hash_bytes + i->n_bytes)) || fdatasync(fd)) return false;
    c->position[file] = i->position;
    return true;
}

/* Pages first: a point must not be durable before what it names. Items of a checkpoint lie together, its point last. */
static void write_batch(struct checkpoint_store *s, struct err *e)
{
    for (size_t k = 0; k < s->n_items; k++) {
        const struct batch_item *i = &s->items[k];
        struct checkpoint *c = i->checkpoint;
        if (i->page >= 0) {
            const bool last = k + 1 == s->n_items || s->items[k + 1].checkpoint != c || s->items[k + 1].page < 0;
            if (write_page(s, i) && (!last || fdatasync(c->fd[PAGES]) == 0)) continue;
            file_error(c, PAGES, e);
            return;
        }
        const int older = c->position[0] <= c->position[1] ? 0 : 1;
        if (!write_point(s, i, older)) {
            file_error(c, older, e);
            return;
        }
    }
    if (s->new_names && fsync(s->folder_fd)) io_error(s, "", e);
    s->new_names = false;
}

static void *write_batches(void *argument)
{
    struct checkpoint_store *s = argument;
    pthread_mutex_lock(&s->mutex);
    for (;;) {
        while (!s->writing && !s->leaving) pthread_cond_wait(&s->changed, &s->mutex);
        if (!s->writing) break;
        pthread_mutex_unlock(&s->mutex);
        struct err e = {0};
        const int64_t start_us = clock_now_us();
        write_batch(s, &e);
        s->n_items = s->n_bytes = 0;
        pthread_mutex_lock(&s->mutex);
        if (e.rc != RC_OK) s->failure = e;
        s->write_us = clock_now_us() - start_us;
        s->writing = false;
        pthread_cond_broadcast(&s->changed);
    }
    pthread_mutex_unlock(&s->mutex);
    return NULL;
}

/* While no batch is being written. */
static void free_closed(struct checkpoint_store *s)
{
    while (s->closed) {
        struct checkpoint *c = s->closed;
        s->closed = c->next_closed;
        for (int file = 0; file < FILES; file++)
            if (c->fd[file] >= 0) close(c->fd[file]);
        free(c->hashes);
        free(c);
    }
}

/* ---- the store ---- */

/* Signals are the process' own business, not the thread's. */
static int start_thread(struct checkpoint_store *s)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int failed = pthread_create(&s->thread, NULL, write_batches, s);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return failed;
}

/* The folder's own name, which this rank or another has just made. */
static bool name_is_durable(int folder_fd)
{
    const int parent = openat(folder_fd, "..", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (parent < 0) return false;
    const bool ok = fsync(parent) == 0;
    close(parent);
    return ok;
}

enum rc checkpoint_store_open(const struct checkpoint_store_options *o, struct checkpoint_store **out, struct err *e)
{
    struct checkpoint_store *s = calloc(1, sizeof *s);
    enum rc rc = RC_OK;
    if (!s) return err_no_memory(e);
    s->o = *o;
    s->folder_fd = -1;
    s->folder = strdup(o->folder);
    if (!s->folder) {
        rc = err_no_memory(e);
        goto free_store;
    }
    s->o.folder = s->folder;
    if (mkdir(o->folder, 0700) == 0 || errno == EEXIST) s->folder_fd = open(o->folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (s->folder_fd < 0 || !name_is_durable(s->folder_fd)) {
        rc = io_error(s, "", e);
        goto free_store;
    }
    pthread_mutex_init(&s->mutex, NULL);
    pthread_cond_init(&s->changed, NULL);
    if (start_thread(s)) {
        rc = err_no_memory(e);
        goto destroy;
    }
    *out = s;
    return RC_OK;
destroy:
    pthread_cond_destroy(&s->changed);
    pthread_mutex_destroy(&s->mutex);
free_store:
    if (s->folder_fd >= 0) close(s->folder_fd);
    free(s->folder);
    free(s);
    return rc;
}

void checkpoint_store_close(struct checkpoint_store *s)
{
    if (!s) return;
    pthread_mutex_lock(&s->mutex);
    s->leaving = true;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->mutex);
    pthread_join(s->thread, NULL);
    free_closed(s);
    pthread_cond_destroy(&s->changed);
    pthread_mutex_destroy(&s->mutex);
    close(s->folder_fd);
    free(s->bytes);
    free(s->items);
    free(s->folder);
    free(s);
}

/* ---- a checkpoint ---- */

enum rc checkpoint_open(struct checkpoint_store *s, const unsigned char key[CHECKPOINT_KEY_BYTES], struct checkpoint **out, struct err *e)
{
    struct checkpoint *c = calloc(1, sizeof *c);
    if (!c) return err_no_memory(e);
    c->store = s;
    memcpy(c->key, key, sizeof c->key);
    for (int file = 0; file < FILES; file++) {
        struct point_header h;
        c->fd[file] = -1;
        if (open_file(c, file, false) && file != PAGES && read_header(c, file, &h)) c->position[file] = (int)h.position;
    }
    *out = c;
    return RC_OK;
}

void checkpoint_close(struct checkpoint *c)
{
    if (!c) return;
    c->next_closed = c->store->closed;
    c->store->closed = c;
}

void checkpoint_positions(const struct checkpoint *c, int out[CHECKPOINT_POINTS])
{
    memcpy(out, c->position, sizeof c->position);
}

static bool make_room(struct checkpoint *c, int n_pages)
{
    if (n_pages <= c->cap_pages) return true;
    int cap = c->cap_pages ? c->cap_pages : 64;
    while (cap < n_pages) cap *= 2;
    uint64_t *hashes = realloc(c->hashes, (size_t)cap * sizeof *hashes);
    if (!hashes) return false;
    c->hashes = hashes;
    c->cap_pages = cap;
    return true;
}

static bool load_pages(struct checkpoint *c, int n_pages, const struct checkpoint_sink *sink)
{
    const size_t page_bytes = c->store->o.page_bytes;
    char *bytes = malloc(page_bytes + 1);
    bool ok = bytes != NULL;
    for (int i = 0; i < n_pages && ok; i++) {
        ok = read_at(c->fd[PAGES], bytes, page_bytes, (off_t)i * (off_t)page_bytes) && XXH3_64bits(bytes, page_bytes) == c->hashes[i];
        if (ok) sink->page(sink->ctx, i, bytes);
    }
    free(bytes);
    return ok;
}

bool checkpoint_load(struct checkpoint *c, int position, const struct checkpoint_sink *sink, size_t most_bytes, struct buf *rest)
{
    struct point_header h;
    struct stat st;
    const int file = position == c->position[0] ? 0 : 1;
    buf_clear(rest);
    if (position <= 0 || position != c->position[file] || !read_header(c, file, &h) || h.position != (uint32_t)position) return false;
    const size_t hash_bytes = h.n_pages * sizeof *c->hashes;
    if (h.rest_bytes > most_bytes || fstat(c->fd[file], &st) || (uint64_t)st.st_size != sizeof h + hash_bytes + h.rest_bytes) return false;
    if (h.n_pages && c->fd[PAGES] < 0) return false;
    if (!make_room(c, (int)h.n_pages) || !buf_reserve(rest, h.rest_bytes)) return false;
    if (!read_at(c->fd[file], c->hashes, hash_bytes, sizeof h)) return false;
    if (!read_at(c->fd[file], rest->data, h.rest_bytes, (off_t)(sizeof h + hash_bytes))) return false;
    rest->len = h.rest_bytes;
    return h.checksum == checksum_of(h, c->hashes, rest->data) && load_pages(c, (int)h.n_pages, sink);
}

enum rc checkpoint_resume(struct checkpoint *c, int position, struct err *e)
{
    for (int file = 0; file < CHECKPOINT_POINTS; file++) {
        if (position && c->position[file] == position) continue;
        c->position[file] = 0;
        if (c->fd[file] >= 0 && ftruncate(c->fd[file], 0)) return file_error(c, file, e);
    }
    c->n_pages = c->store->o.page_bytes ? position / PREFIX_BLOCK_TOKENS : 0;
    return RC_OK;
}

/* ---- a batch ---- */

static enum rc add(struct checkpoint *c, struct batch_item item, void **out, struct err *e)
{
    struct checkpoint_store *s = c->store;
    if (s->n_items == s->cap_items) {
        const size_t cap = s->cap_items ? 2 * s->cap_items : 64;
        struct batch_item *items = realloc(s->items, cap * sizeof *items);
        if (!items) return err_no_memory(e);
        s->items = items;
        s->cap_items = cap;
    }
    if (item.n_bytes > s->cap_bytes - s->n_bytes) {
        size_t cap = s->cap_bytes ? s->cap_bytes : 1 << 20;
        while (item.n_bytes > cap - s->n_bytes)
            if (!size_mul(cap, 2, &cap)) return err_no_memory(e);
        char *bytes = realloc(s->bytes, cap);
        if (!bytes) return err_no_memory(e);
        s->bytes = bytes;
        s->cap_bytes = cap;
    }
    item.at = s->n_bytes;
    s->n_bytes += item.n_bytes;
    s->items[s->n_items++] = item;
    *out = s->bytes + item.at;
    return RC_OK;
}

int checkpoint_pages(const struct checkpoint *c) { return c->n_pages; }

enum rc checkpoint_add_page(struct checkpoint *c, void **out, struct err *e)
{
    if (!open_file(c, PAGES, true)) return file_error(c, PAGES, e);
    if (c->n_pages == MOST_PAGES || !make_room(c, c->n_pages + 1)) return err_no_memory(e);
    enum rc rc = add(c, (struct batch_item){.checkpoint = c, .n_bytes = c->store->o.page_bytes, .page = c->n_pages}, out, e);
    if (rc == RC_OK) c->n_pages++;
    return rc;
}

enum rc checkpoint_add_point(struct checkpoint *c, int position, size_t n_bytes, void **out, struct err *e)
{
    /* Made here, not by the thread: once a request has ended, nothing of it comes into being. */
    for (int file = 0; file < CHECKPOINT_POINTS; file++)
        if (!open_file(c, file, true)) return file_error(c, file, e);
    return add(c, (struct batch_item){.checkpoint = c, .n_bytes = n_bytes, .page = -1, .position = position}, out, e);
}

void checkpoint_store_write(struct checkpoint_store *s)
{
    pthread_mutex_lock(&s->mutex);
    s->writing = true;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->mutex);
}

enum rc checkpoint_store_status(struct checkpoint_store *s, struct err *e)
{
    pthread_mutex_lock(&s->mutex);
    enum rc rc = s->writing ? RC_RETRY : s->failure.rc;
    if (rc == RC_FAILED && e) *e = s->failure;
    pthread_mutex_unlock(&s->mutex);
    if (rc != RC_RETRY && !s->n_items) free_closed(s);
    return rc;
}

int64_t checkpoint_store_write_us(const struct checkpoint_store *s) { return s->write_us; }

/* ---- care ---- */

void checkpoint_remove(const char *folder, const unsigned char key[CHECKPOINT_KEY_BYTES])
{
    const int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    char name[NAME_BYTES];
    for (int rank = 0; rank < MAX_RANKS && fd >= 0; rank++)
        for (int file = 0; file < FILES; file++) {
            name_of(key, rank, file, name);
            unlinkat(fd, name, 0);
        }
    if (fd >= 0) close(fd);
}

static int hex_digit(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* The key that a file name is of. False: it is of none. */
static bool key_of(const char *name, unsigned char key[CHECKPOINT_KEY_BYTES])
{
    for (int i = 0; i < CHECKPOINT_KEY_BYTES; i++) {
        const int high = hex_digit(name[2 * i]), low = high < 0 ? -1 : hex_digit(name[2 * i + 1]);
        if (low < 0) return false;
        key[i] = (unsigned char)(16 * high + low);
    }
    for (int rank = 0; rank < MAX_RANKS; rank++)
        for (int file = 0; file < FILES; file++) {
            char whole[NAME_BYTES];
            name_of(key, rank, file, whole);
            if (!strcmp(whole, name)) return true;
        }
    return false;
}

void checkpoint_sweep(const char *folder, bool (*keep)(void *ctx, const unsigned char key[CHECKPOINT_KEY_BYTES]), void *ctx)
{
    DIR *d = opendir(folder);
    if (!d) return;
    for (const struct dirent *entry; (entry = readdir(d));) {
        unsigned char key[CHECKPOINT_KEY_BYTES];
        if (key_of(entry->d_name, key) && !keep(ctx, key)) unlinkat(dirfd(d), entry->d_name, 0);
    }
    closedir(d);
    rmdir(folder);
}
