/* prefix_store against what happens to files and processes: flipped bits and cuts at every kind of place of payload and index,
 * missing and foreign files, forged names, processes that die, and several at once. Never a signal, never a wrong byte; what an
 * intact payload holds survives the loss of the index. */
#define _GNU_SOURCE
#include "prefix_fixture.h"

#include <fcntl.h>
#include <nettle/sha2.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "prefix_index.h"
#include "prefix_recover.h"

static void path_of(const struct place *p, const char *name, char out[256]) { snprintf(out, 256, "%s/rank-0/%s", p->folder, name); }

static void read_file(const char *path, struct buf *out)
{
    assert_int_equal(file_read(path, 1 << 26, out, NULL), RC_OK);
}

static void write_file(const char *path, const void *bytes, size_t n)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    assert_true(fd >= 0 && fd_write_all(fd, bytes, n));
    close(fd);
}

static void copy_to(void *ctx, const char *path)
{
    struct buf bytes = {0};
    read_file(path, &bytes);
    write_file(ctx, bytes.data, bytes.len);
    buf_free(&bytes);
}

/* One bit of the byte at offset, which one depends on it. */
static void flip(const char *path, size_t offset)
{
    unsigned char byte;
    int fd = open(path, O_RDWR);
    assert_true(fd >= 0 && pread(fd, &byte, 1, (off_t)offset) == 1);
    byte ^= (unsigned char)(1 << offset % 8);
    assert_int_equal(pwrite(fd, &byte, 1, (off_t)offset), 1);
    close(fd);
}

/* What fn does in a process of its own ends well. */
static void in_child(void (*fn)(struct place *p, const void *ctx), struct place *p, const void *ctx, const char *what, size_t at)
{
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        fn(p, ctx);
        _exit(wrong_bytes ? 3 : 0);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    if (!WIFEXITED(status) || WEXITSTATUS(status)) fail_msg("%s at %zu: status %x", what, at, (unsigned)status);
}

/* A condition inside a child, where cmocka cannot report. */
static void must(bool condition, int line)
{
    if (condition) return;
    fprintf(stderr, "child: line %d\n", line);
    _exit(2);
}
#define MUST(condition) must(condition, __LINE__)

/* As load_right, for children. */
static bool load_any(struct prefix_store *s, const struct prompt_ids *a, int position)
{
    const struct prefix_sink sink = {NULL, sink_block, sink_state};
    at_ids = a->ids, at_position = position;
    return prefix_store_load(s, a->ids, 0, position, &sink);
}

/* ---- payload ---- */

enum { POSITION = 4 * 64 };
struct first_path {
    char path[512];
};
static void path_take(void *ctx, const char *path) { snprintf(((struct first_path *)ctx)->path, 512, "%s", path); }

/* Damages the only file of a kind again and again; each time it is a miss, gone, and put again. */
static void payload_damage(struct place *p, const char *suffix, bool cut)
{
    struct prefix_store *s = open_good(p, NULL);
    struct prompt_ids a = ids_make(1, POSITION + 1);
    struct buf bytes = {0};
    uint64_t servable[PREFIX_WORDS(POSITION + 1)];
    assert_int_equal(put(s, &a, POSITION), RC_OK);
    size_t size = 1;
    for (size_t at = 0; at < size; at += at < 300 ? 1 : 7) {
        struct first_path file = {""};
        assert_int_equal(files_each(p, suffix, path_take, &file), 1);
        read_file(file.path, &bytes);
        size = bytes.len;
        if (cut)
            assert_int_equal(truncate(file.path, (off_t)at), 0);
        else
            flip(file.path, at);
        if (load_right(s, &a, 0, POSITION)) fail_msg("%s is served with byte %zu wrong", suffix, at);
        assert_int_equal(access(file.path, F_OK), -1);
        prefix_store_lookup(s, a.ids, a.n, servable);
        assert_int_equal(prefix_greatest(servable, a.n), 0);
        assert_int_equal(put(s, &a, POSITION), RC_OK);
        assert_true(load_right(s, &a, 0, POSITION));
    }
    /* A byte too many. */
    struct first_path file = {""};
    files_each(p, suffix, path_take, &file);
    assert_int_equal(truncate(file.path, (off_t)size + 1), 0);
    assert_false(load_right(s, &a, 0, POSITION));
    struct prefix_stat stat;
    assert_int_equal(prefix_store_stat(s, &stat, NULL), RC_OK);
    assert_int_equal(stat.bytes, bytes_in(p));
    assert_true(size > 600);
    buf_free(&bytes);
    prefix_store_close(s);
}

static void test_blocks_flipped(void **ctx) { payload_damage(*ctx, ".kv", false); }
static void test_blocks_cut(void **ctx) { payload_damage(*ctx, ".kv", true); }
static void test_state_flipped(void **ctx) { payload_damage(*ctx, ".state", false); }
static void test_state_cut(void **ctx) { payload_damage(*ctx, ".state", true); }

static void file_damage(void *ctx, const char *path)
{
    static int turn;
    const char *other = ctx;
    unlink(path);
    switch (turn++ % 6) {
    case 0: break; /* missing */
    case 1: assert_int_equal(mkdir(path, 0700), 0); break;
    case 2: assert_int_equal(symlink("/etc/passwd", path), 0); break;
    case 3: assert_int_equal(mkfifo(path, 0600), 0); break;
    case 4: write_file(path, "", 0); break;
    default: assert_int_equal(link(other, path), 0); break; /* whole, and another's */
    }
}

/* Found by a load, by verify, and by the next opening. */
static void test_files_replaced(void **ctx)
{
    struct place *p = *ctx;
    struct prompt_ids a = ids_make(1, 64 + 1), b = ids_make(2, 64 + 1);
    for (int way = 0; way < 3; way++)
        for (int turn = 0; turn < 6; turn++) {
            struct first_path other = {""};
            char kept[256];
            struct prefix_store *s = open_good(p, NULL);
            assert_int_equal(put(s, &b, 64), RC_OK);
            files_each(p, ".kv", path_take, &other);
            snprintf(kept, sizeof kept, "%s/kept", p->base);
            assert_int_equal(rename(other.path, kept), 0);
            assert_false(load_right(s, &b, 0, 64));
            assert_int_equal(put(s, &a, 64), RC_OK);
            files_each(p, ".kv", file_damage, kept);
            if (way == 0) {
                assert_false(load_right(s, &a, 0, 64));
            } else if (way == 1) {
                struct prefix_count read, deleted;
                assert_int_equal(prefix_store_verify(s, &read, &deleted, NULL), RC_OK);
                assert_int_equal(deleted.files, 1);
                assert_int_equal(read.files, 2);
            } else {
                prefix_store_close(s);
                s = open_good(p, NULL);
            }
            assert_false(load_right(s, &a, 0, 64));
            assert_int_equal(put(s, &a, 64), RC_OK);
            assert_true(load_right(s, &a, 0, 64));
            struct prefix_count gone;
            assert_int_equal(prefix_store_prune(s, 0, 0, &gone, NULL), RC_OK);
            prefix_store_close(s);
            char rest[600];
            snprintf(rest, sizeof rest, "rm -rf '%s'/rank-0/????????????????.kv", p->folder);
            assert_int_equal(system(rest), 0);
            unlink(kept);
        }
}

/* ---- index ---- */

struct index_case {
    struct prompt_ids *prompts;
    int n;
};

static void all_served(struct place *p, const void *ctx)
{
    const struct index_case *c = ctx;
    struct prefix_store_options o = options_of(p);
    struct prefix_store *s;
    struct prompt_ids more = ids_make(999, 7 * 64 + 1);
    MUST(prefix_store_open(&o, &s, NULL) == RC_OK);
    for (int i = 0; i < c->n; i++) MUST(load_any(s, &c->prompts[i], POSITION));
    for (int i = 0; i < 3; i++) MUST(put(s, &more, (i + 5) * 64) == RC_OK);
    MUST(load_any(s, &more, 7 * 64));
    struct prefix_count gone;
    MUST(prefix_store_prune(s, 2000, 0, &gone, NULL) == RC_OK);
    prefix_store_close(s);
}

/* The folder as it was: payload files are never changed in place, so links will do. */
static void link_back(void *ctx, const char *path)
{
    char to[600];
    snprintf(to, sizeof to, "%s/rank-0/%s", ((struct place *)ctx)->folder, strrchr(path, '/') + 1);
    assert_int_equal(link(path, to), 0);
}

static void folder_restore(struct place *p, const struct place *kept)
{
    char path[256];
    nftw(p->folder, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    path_of(p, "", path);
    assert_int_equal(mkdir(p->folder, 0700) | mkdir(path, 0700), 0);
    files_each(kept, NULL, link_back, p);
    static const char *const names[] = {PREFIX_INDEX_NAME, PREFIX_INDEX_NAME "-lock"};
    for (int i = 0; i < 2; i++) {
        char from[256];
        path_of(kept, names[i], from);
        path_of(p, names[i], path);
        copy_to(path, from);
    }
}

/* Whatever happens to a file of the index, every whole payload file is served. */
static void index_damage(struct place *p, const char *name, bool cut, size_t fine, size_t step)
{
    enum { N = 20 };
    struct index_case c = {calloc(N, sizeof *c.prompts), N};
    struct place kept = *p;
    char path[256];
    struct stat st;
    log_set(LOG_ERROR, "");
    struct prefix_store *s = open_good(p, NULL);
    for (int i = 0; i < N; i++) {
        c.prompts[i] = ids_make(i, POSITION + 1);
        assert_int_equal(put(s, &c.prompts[i], POSITION), RC_OK);
    }
    /* Some history, so that there is a free list. */
    for (int i = 0; i < N; i++) assert_true(load_right(s, &c.prompts[i], 0, POSITION));
    prefix_store_close(s);
    snprintf(kept.folder, sizeof kept.folder, "%s/kept", p->base);
    assert_int_equal(rename(p->folder, kept.folder), 0);
    path_of(&kept, name, path);
    assert_int_equal(stat(path, &st), 0);
    assert_true(st.st_size > 4096);
    path_of(p, name, path);
    for (size_t at = 0; at < (size_t)st.st_size; at += at % 4096 < fine ? 1 : step) {
        folder_restore(p, &kept);
        if (cut)
            assert_int_equal(truncate(path, (off_t)at), 0);
        else
            flip(path, at);
        in_child(all_served, p, &c, name, at);
    }
    free(c.prompts);
}

static void test_index_flipped(void **ctx) { index_damage(*ctx, PREFIX_INDEX_NAME, false, 40, 149); }
static void test_index_cut(void **ctx) { index_damage(*ctx, PREFIX_INDEX_NAME, true, 2, 1021); }
static void test_index_lock_flipped(void **ctx) { index_damage(*ctx, PREFIX_INDEX_NAME "-lock", false, 16, 251); }

static void test_index_lost(void **ctx)
{
    struct place *p = *ctx;
    struct prompt_ids a = ids_make(1, 70 * 64 + 1), b = ids_branch(&a, 50 * 64, 2);
    char path[256];
    struct prefix_store *s = open_good(p, NULL);
    assert_int_equal(put(s, &a, 70 * 64), RC_OK);
    assert_int_equal(put(s, &b, 70 * 64), RC_OK);
    struct prefix_stat before, after;
    assert_int_equal(prefix_store_stat(s, &before, NULL), RC_OK);
    prefix_store_close(s);
    path_of(p, PREFIX_INDEX_NAME, path);
    for (int way = 0; way < 3; way++) {
        if (way == 0) unlink(path);
        if (way == 1) write_file(path, "", 0);
        if (way == 2) write_file(path, "what is this", 12);
        s = open_good(p, NULL);
        assert_true(load_right(s, &a, 0, 70 * 64));
        assert_true(load_right(s, &b, 0, 70 * 64));
        assert_int_equal(prefix_store_stat(s, &after, NULL), RC_OK);
        assert_int_equal(after.files, before.files);
        assert_int_equal(after.bytes, before.bytes);
        assert_int_equal(after.blocks, before.blocks);
        prefix_store_close(s);
    }
}

/* ---- orphans ---- */

static void test_orphans(void **ctx)
{
    struct place *p = *ctx;
    struct prompt_ids a = ids_make(1, POSITION + 1);
    char unfinished[256], doubled[256], garbage[256], foreign[256];
    path_of(p, "0123456789abcdef.new", unfinished);
    path_of(p, "0123456789abcdef.kv", doubled);
    path_of(p, "fedcba9876543210.state", garbage);
    path_of(p, "notes.txt", foreign);
    struct prefix_store *s = open_good(p, NULL);
    assert_int_equal(put(s, &a, POSITION), RC_OK);
    files_each(p, ".kv", copy_to, doubled);
    write_file(unfinished, "abc", 3);
    write_file(garbage, "abc", 3);
    write_file(foreign, "abc", 3);
    prefix_store_close(s);
    s = open_good(p, NULL);
    assert_int_equal(access(unfinished, F_OK) & access(doubled, F_OK) & access(garbage, F_OK), -1);
    assert_int_equal(access(foreign, F_OK), 0);
    assert_true(load_right(s, &a, 0, POSITION));
    assert_int_equal(files_in(p), 2);
    prefix_store_close(s);
    /* A payload without its record is taken up; a record without its payload goes. */
    struct first_path file = {""};
    files_each(p, ".kv", path_take, &file);
    assert_int_equal(rename(file.path, doubled), 0);
    s = open_good(p, NULL);
    assert_int_equal(access(doubled, F_OK), 0);
    assert_true(load_right(s, &a, 0, POSITION));
    struct prefix_stat stat;
    assert_int_equal(prefix_store_stat(s, &stat, NULL), RC_OK);
    assert_int_equal(stat.files, 2);
    assert_int_equal(stat.bytes, bytes_in(p));
    prefix_store_close(s);
}

/* ---- forged names ---- */

struct forged {
    const unsigned char *bytes;
};
static void forged_item(void *ctx, uint32_t i, void *out)
{
    (void)i;
    memcpy(out, ((struct forged *)ctx)->bytes, BLOCK_BYTES);
}

/* Puts a whole file into a closed store: of the block `block` of tokens, under the name that it has in named. */
static void forge(struct place *p, const int32_t *tokens, const int32_t *named, int block)
{
    static struct prefix_payload payload;
    unsigned char bytes[BLOCK_BYTES];
    struct prefix_store_options o = options_of(p);
    struct prefix_key keys[64];
    struct prefix_file f = {.id = 0x1234, .kind = PREFIX_KV, .first_block = (uint32_t)block, .n_blocks = 1};
    char path[256], scratch[BLOCK_BYTES];
    struct forged item = {bytes};
    memset(bytes, 0xee, sizeof bytes); /* right for nothing */
    prefix_chain(&o.fingerprint, named, (block + 1) * 64, keys);
    f.keys[0] = keys[block];
    payload.h = (struct prefix_header){.kind = PREFIX_KV,
                                       .fingerprint = o.fingerprint,
                                       .parent = block ? keys[block - 1] : o.fingerprint,
                                       .first_block = (uint32_t)block,
                                       .n_blocks = 1,
                                       .item_bytes = BLOCK_BYTES};
    struct sha256_ctx hash;
    sha256_init(&hash);
    sha256_update(&hash, (size_t)block * 256, (const uint8_t *)tokens);
    sha256_digest(&hash, sizeof payload.h.before, payload.h.before);
    memcpy(payload.tokens, tokens + block * 64, 256);
    assert_true(prefix_payload_bytes(&payload.h, &f.bytes));
    path_of(p, "", path);
    int fd = open(path, O_RDONLY | O_DIRECTORY);
    struct prefix_name name = {f.id, PREFIX_KV};
    assert_int_equal(prefix_payload_write(fd, name, &payload, forged_item, &item, scratch, NULL), RC_OK);
    close(fd);
    path_of(p, PREFIX_INDEX_NAME, path);
    struct prefix_index ix;
    MDB_txn *txn;
    assert_int_equal(prefix_index_open(path, false, &ix), 0);
    assert_int_equal(mdb_txn_begin(ix.env, NULL, 0, &txn), 0);
    assert_int_equal(prefix_index_add(&ix, txn, &f), 0);
    assert_int_equal(mdb_txn_commit(txn), 0);
    prefix_index_close(&ix);
}

/* Two prompts with one name, which is what a forger makes of a hash that can be forged. */
static void test_forged_names(void **ctx)
{
    struct place *p = *ctx;
    struct prompt_ids a = ids_make(1, 3 * 64 + 1), other = ids_make(2, 3 * 64 + 1);
    for (int way = 0; way < 4; way++) {
        struct prompt_ids b = a;
        int block = way < 2 ? 0 : 2;
        struct prefix_store *s = open_good(p, NULL);
        if (block) assert_int_equal(put(s, &a, 2 * 64), RC_OK);
        prefix_store_close(s);
        if (way == 0) b.ids[63]++;               /* its own tokens differ */
        if (way == 1) b = other;
        if (way == 2) b.ids[2 * 64 + 5]++;
        if (way == 3) b.ids[0]++;                /* its tokens are equal, those before it are not */
        forge(p, b.ids, a.ids, block);
        s = open_good(p, NULL);
        uint64_t servable[PREFIX_WORDS(3 * 64 + 1)];
        assert_int_equal(prefix_store_lookup(s, a.ids, a.n, servable), (block + 1) * 64);
        struct prefix_store_options o = options_of(p);
        prefix_store_close(s);
        o.state_bytes = 0;
        s = open_good(p, &o);
        assert_false(load_right(s, &a, 0, (block + 1) * 64));
        assert_false(load_right(s, &a, block * 64, (block + 1) * 64));
        assert_int_equal(prefix_store_lookup(s, a.ids, a.n, servable), block * 64);
        assert_int_equal(put(s, &a, 3 * 64), RC_OK);
        assert_true(load_right(s, &a, 0, 3 * 64));
        struct prefix_count gone;
        assert_int_equal(prefix_store_prune(s, 0, 0, &gone, NULL), RC_OK);
        prefix_store_close(s);
    }
}

/* ---- processes ---- */

static uint64_t random_state = 1;
static unsigned random_below(unsigned n)
{
    random_state = random_state * UINT64_C(6364136223846793005) + 1442695040888963407u;
    return (unsigned)(random_state >> 33) % n;
}

/* Ten families of prompts that share beginnings. */
static struct prompt_ids some_prompt(void)
{
    struct prompt_ids a = ids_make(50 + (int)random_below(4), 12 * 64 + 1);
    return ids_branch(&a, 64 * (int)(1 + random_below(11)), 60 + (int)random_below(3));
}

static void use_store(struct prefix_store *s, int turns)
{
    for (int i = 0; i < turns; i++) {
        struct prompt_ids a = some_prompt();
        int position = 64 * (int)(1 + random_below(12));
        uint64_t servable[PREFIX_WORDS(12 * 64 + 1)];
        prefix_store_lookup(s, a.ids, a.n, servable);
        int greatest = prefix_greatest(servable, a.n);
        if (greatest) load_any(s, &a, greatest);
        enum rc rc = put(s, &a, position);
        MUST(rc == RC_OK || rc == RC_RETRY);
    }
    MUST(wrong_bytes == 0);
}

static void consistent(struct place *p, uint64_t most_bytes)
{
    struct prefix_store *s = open_good(p, NULL);
    struct prefix_stat stat;
    struct prefix_count read, deleted;
    assert_int_equal(unfinished_in(p), 0);
    assert_int_equal(prefix_store_verify(s, &read, &deleted, NULL), RC_OK);
    assert_int_equal(deleted.files, 0);
    assert_int_equal(prefix_store_stat(s, &stat, NULL), RC_OK);
    assert_int_equal(stat.bytes, bytes_in(p));
    assert_int_equal(stat.files, (uint64_t)files_in(p));
    assert_true(stat.bytes <= most_bytes);
    prefix_store_close(s);
}

enum { TIGHT_BYTES = 20000 };

static pid_t worker_start(struct place *p, unsigned seed, int turns)
{
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid) return pid;
    struct prefix_store_options o = options_of(p);
    struct prefix_store *s;
    o.quota_bytes = TIGHT_BYTES;
    random_state = seed;
    MUST(prefix_store_open(&o, &s, NULL) == RC_OK);
    use_store(s, turns);
    prefix_store_close(s);
    _exit(0);
}

static void test_several_at_once(void **ctx)
{
    struct place *p = *ctx;
    pid_t workers[4];
    for (unsigned i = 0; i < 4; i++) workers[i] = worker_start(p, i + 1, 200);
    for (int i = 0; i < 4; i++) {
        int status;
        assert_int_equal(waitpid(workers[i], &status, 0), workers[i]);
        assert_int_equal(status, 0);
    }
    consistent(p, TIGHT_BYTES);
}

/* Killed anywhere: while opening, writing, committing, evicting; every other time with a second process at work. */
static void test_killed(void **ctx)
{
    struct place *p = *ctx;
    for (unsigned i = 0; i < 100; i++) {
        pid_t survivor = i % 2 ? worker_start(p, i + 1000, 20) : 0;
        pid_t victim = worker_start(p, i + 1, 1 << 20);
        random_state += i;
        usleep(random_below(i < 50 ? 4000 : 25000));
        int status;
        kill(victim, SIGKILL);
        assert_int_equal(waitpid(victim, &status, 0), victim);
        assert_true(WIFSIGNALED(status));
        if (survivor) {
            assert_int_equal(waitpid(survivor, &status, 0), survivor);
            assert_int_equal(status, 0);
        }
        /* A file that was named and not yet known may exceed the quota until the next put. */
        consistent(p, TIGHT_BYTES + 20000);
    }
    struct prefix_store *s = open_good(p, NULL);
    use_store(s, 50);
    assert_int_equal(wrong_bytes, 0);
    prefix_store_close(s);
}

/* A process that holds the store open until its end of a pipe is closed. */
static pid_t holder_start(struct place *p, int *hold_fd)
{
    int ready[2], hold[2];
    char byte = 0;
    assert_int_equal(pipe(ready) | pipe(hold), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        struct prefix_store_options o = options_of(p);
        struct prefix_store *s;
        close(hold[1]);
        MUST(prefix_store_open(&o, &s, NULL) == RC_OK);
        MUST(write(ready[1], &byte, 1) == 1);
        _exit(read(hold[0], &byte, 1) != 0);
    }
    close(ready[1]);
    close(hold[0]);
    assert_int_equal(read(ready[0], &byte, 1), 1);
    close(ready[0]);
    *hold_fd = hold[1];
    return pid;
}

/* Another process that puts a prompt while this one is between making room for its file and putting it into the index. */
static struct {
    int ask_fd, answer_fd;
    bool asked;
} rival;

static void rival_state(void *ctx, void *out)
{
    char byte = 0;
    source_state(ctx, out);
    if (rival.asked) return;
    rival.asked = true;
    assert_int_equal(write(rival.ask_fd, &byte, 1), 1);
    assert_int_equal(read(rival.answer_fd, &byte, 1), 1);
}

static pid_t rival_start(const struct prefix_store_options *o, const struct prompt_ids *a)
{
    int ask[2], answer[2];
    char byte;
    assert_int_equal(pipe(ask) | pipe(answer), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        struct prefix_store *s;
        MUST(read(ask[0], &byte, 1) == 1);
        MUST(prefix_store_open(o, &s, NULL) == RC_OK);
        MUST(put(s, a, 64) == RC_OK);
        prefix_store_close(s);
        MUST(write(answer[1], &byte, 1) == 1);
        _exit(0);
    }
    close(ask[0]);
    close(answer[1]);
    rival.ask_fd = ask[1];
    rival.answer_fd = answer[0];
    rival.asked = false;
    return pid;
}

/* The quota holds, and of two equal files one stays. States alone, so that each put is one file. */
static void test_rivals(void **ctx)
{
    struct place *p = *ctx;
    struct prefix_store_options o = options_of(p);
    struct prompt_ids a = ids_make(1, 64 + 1), b = ids_make(2, 64 + 1);
    const struct prefix_source source = {NULL, source_block, rival_state};
    o.block_bytes = 0;
    for (int same = 0; same < 2; same++) {
        struct prefix_stat stat;
        struct prefix_count gone;
        struct prefix_store *s = open_good(p, &o);
        assert_int_equal(put(s, &a, 64), RC_OK);
        assert_int_equal(prefix_store_stat(s, &stat, NULL), RC_OK);
        assert_int_equal(prefix_store_prune(s, 0, 0, &gone, NULL), RC_OK);
        prefix_store_close(s);
        o.quota_bytes = same ? 0 : stat.bytes; /* of one */
        pid_t pid = rival_start(&o, same ? &a : &b);
        s = open_good(p, &o);
        at_ids = a.ids, at_position = 64;
        assert_int_equal(prefix_store_put(s, a.ids, 64, &source, NULL), RC_OK);
        assert_true(rival.asked);
        assert_int_equal(prefix_store_stat(s, &stat, NULL), RC_OK);
        assert_int_equal(stat.files, 1);
        assert_int_equal(files_in(p), 1);
        assert_true(load_right(s, &a, 0, 64));
        prefix_store_close(s);
        int status;
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_int_equal(status, 0);
        close(rival.ask_fd);
        close(rival.answer_fd);
    }
}

static void test_index_damaged_in_use(void **ctx)
{
    struct place *p = *ctx;
    struct prompt_ids a = ids_make(1, POSITION + 1);
    struct prefix_store *s = open_good(p, NULL);
    assert_int_equal(put(s, &a, POSITION), RC_OK);
    prefix_store_close(s);
    int hold_fd, status;
    pid_t holder = holder_start(p, &hold_fd);
    char path[256];
    struct buf index = {0};
    path_of(p, PREFIX_INDEX_NAME, path);
    read_file(path, &index);
    int fd = open(path, O_WRONLY);
    memset(index.data + 2 * 4096, 0xff, index.len - 2 * 4096);
    assert_int_equal(pwrite(fd, index.data + 2 * 4096, index.len - 2 * 4096, 2 * 4096), (ssize_t)index.len - 2 * 4096);
    close(fd);
    buf_free(&index);
    struct prefix_store_options o = options_of(p);
    struct err e = {0};
    log_set(LOG_ERROR, "");
    assert_int_equal(prefix_store_open(&o, &s, &e), RC_FAILED);
    assert_string_equal(e.code, "store_damaged");
    close(hold_fd);
    assert_int_equal(waitpid(holder, &status, 0), holder);
    assert_int_equal(status, 0);
    s = open_good(p, NULL);
    assert_true(load_right(s, &a, 0, POSITION));
    prefix_store_close(s);
}

/* Who comes while the first one still looks through the folder waits for it. */
static void test_waits_for_the_first(void **ctx)
{
    struct place *p = *ctx;
    struct prefix_store *s = open_good(p, NULL);
    prefix_store_close(s);
    char path[256];
    path_of(p, "lock", path);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        MUST(flock(open(path, O_RDWR), LOCK_EX) == 0);
        write_file(path, "x", 1);
        usleep(300000);
        _exit(0);
    }
    struct stat st = {0};
    while (stat(path, &st) || !st.st_size) usleep(1000);
    int64_t from_us = clock_now_us();
    s = open_good(p, NULL);
    assert_true(clock_now_us() - from_us > 100000);
    prefix_store_close(s);
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
}

/* The index cannot grow: a put fails, everything else goes on. */
static void without_room(struct place *p, const void *ctx)
{
    const struct prompt_ids *a = ctx;
    struct prefix_store_options o = options_of(p);
    struct prefix_store *s;
    struct err e = {0};
    struct stat st;
    char path[256];
    MUST(prefix_store_open(&o, &s, NULL) == RC_OK);
    path_of(p, PREFIX_INDEX_NAME, path);
    MUST(stat(path, &st) == 0);
    struct rlimit limit = {(rlim_t)st.st_size, (rlim_t)st.st_size};
    signal(SIGXFSZ, SIG_IGN);
    MUST(setrlimit(RLIMIT_FSIZE, &limit) == 0);
    enum rc rc = RC_OK;
    for (int i = 0; i < 500 && rc == RC_OK; i++) {
        struct prompt_ids b = ids_make(1000 + i, 40 * 64 + 1);
        rc = put_err(s, &b, 40 * 64, &e);
    }
    MUST(rc == RC_FAILED && e.exit_status == EXIT_IO);
    struct prefix_stat stored;
    MUST(prefix_store_stat(s, &stored, NULL) == RC_OK && stored.files == (uint64_t)files_in(p));
    MUST(load_any(s, a, POSITION));
    MUST(load_any(s, a, POSITION));
    prefix_store_close(s);
}

static void test_index_without_room(void **ctx)
{
    struct place *p = *ctx;
    struct prompt_ids a = ids_make(1, POSITION + 1);
    struct prefix_store *s = open_good(p, NULL);
    assert_int_equal(put(s, &a, POSITION), RC_OK);
    prefix_store_close(s);
    in_child(without_room, p, &a, "full disk", 0);
    consistent(p, UINT64_MAX);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_blocks_flipped, setup, teardown),
        cmocka_unit_test_setup_teardown(test_blocks_cut, setup, teardown),
        cmocka_unit_test_setup_teardown(test_state_flipped, setup, teardown),
        cmocka_unit_test_setup_teardown(test_state_cut, setup, teardown),
        cmocka_unit_test_setup_teardown(test_files_replaced, setup, teardown),
        cmocka_unit_test_setup_teardown(test_index_flipped, setup, teardown),
        cmocka_unit_test_setup_teardown(test_index_cut, setup, teardown),
        cmocka_unit_test_setup_teardown(test_index_lock_flipped, setup, teardown),
        cmocka_unit_test_setup_teardown(test_index_lost, setup, teardown),
        cmocka_unit_test_setup_teardown(test_orphans, setup, teardown),
        cmocka_unit_test_setup_teardown(test_forged_names, setup, teardown),
        cmocka_unit_test_setup_teardown(test_several_at_once, setup, teardown),
        cmocka_unit_test_setup_teardown(test_rivals, setup, teardown),
        cmocka_unit_test_setup_teardown(test_killed, setup, teardown),
        cmocka_unit_test_setup_teardown(test_index_damaged_in_use, setup, teardown),
        cmocka_unit_test_setup_teardown(test_waits_for_the_first, setup, teardown),
        cmocka_unit_test_setup_teardown(test_index_without_room, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
