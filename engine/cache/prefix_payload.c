/* prefix_payload: files in, files out, with no knowledge of the index.
 *
 * Reading goes through pread, never a map: a file that shrinks under a map kills its reader. Nothing of a file is used as a
 * size or an offset before its checksum and the file's own length have agreed with it. An item's checksum stands in the
 * checked header, so items cannot be swapped. The name of a new file is not synced with its folder: after a power cut it
 * may be gone, which is a miss; its content was synced before it had a name. */
#define _GNU_SOURCE
#include "prefix_payload.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

static const uint64_t payload_magic = UINT64_C(0x5846504d444e4154); /* "TANDMPFX" */
enum { PAYLOAD_VERSION = 1, ID_CHARS = 16 };
static_assert(sizeof(struct prefix_header) == 104, "no padding");

static const char *const kind_suffixes[] = {[PREFIX_KV] = ".kv", [PREFIX_STATE] = ".state"};

/* ---- names ---- */

void prefix_name_format(struct prefix_name n, char out[PREFIX_NAME_CHARS])
{
    snprintf(out, PREFIX_NAME_CHARS, "%016" PRIx64 "%s", n.id, kind_suffixes[n.kind]);
}

static void unfinished_name(struct prefix_name n, char out[PREFIX_NAME_CHARS])
{
    snprintf(out, PREFIX_NAME_CHARS, "%016" PRIx64 ".new", n.id);
}

enum prefix_name_kind prefix_name_parse(const char *text, struct prefix_name *out)
{
    if (strlen(text) < ID_CHARS || strspn(text, "0123456789abcdef") != ID_CHARS) return PREFIX_NAME_FOREIGN;
    out->id = 0;
    for (int i = 0; i < ID_CHARS; i++)
        out->id = out->id << 4 | (uint64_t)(text[i] <= '9' ? text[i] - '0' : text[i] - 'a' + 10);
    if (!strcmp(text + ID_CHARS, ".new")) return PREFIX_NAME_UNFINISHED;
    for (out->kind = PREFIX_KV; out->kind <= PREFIX_STATE; out->kind++)
        if (!strcmp(text + ID_CHARS, kind_suffixes[out->kind])) return PREFIX_NAME_PAYLOAD;
    return PREFIX_NAME_FOREIGN;
}

/* ---- layout ---- */

uint32_t prefix_payload_items(const struct prefix_header *h) { return h->kind == PREFIX_STATE ? 1 : h->n_blocks; }

static size_t tokens_bytes(const struct prefix_header *h) { return h->n_blocks * PREFIX_BLOCK_TOKENS * sizeof(int32_t); }
static size_t checksums_bytes(const struct prefix_header *h) { return prefix_payload_items(h) * sizeof(uint64_t); }
static size_t head_bytes(const struct prefix_header *h) { return sizeof *h + tokens_bytes(h) + checksums_bytes(h); }

bool prefix_payload_bytes(const struct prefix_header *h, uint64_t *out)
{
    size_t items, all;
    if (!size_mul(prefix_payload_items(h), h->item_bytes, &items) || !size_add(items, head_bytes(h), &all)) return false;
    if (all > INT64_MAX) return false;
    *out = all;
    return true;
}

void prefix_payload_keys(const struct prefix_payload *p, struct prefix_key *keys)
{
    prefix_chain(&p->h.parent, p->tokens, (int)(p->h.n_blocks * PREFIX_BLOCK_TOKENS), keys);
}

static uint64_t head_checksum(const struct prefix_payload *p)
{
    struct prefix_header h = p->h;
    h.checksum = 0;
    uint64_t sum = XXH3_64bits(&h, sizeof h);
    sum = XXH3_64bits_withSeed(p->tokens, tokens_bytes(&h), sum);
    return XXH3_64bits_withSeed(p->checksums, checksums_bytes(&h), sum);
}

/* ---- writing ---- */

enum rc prefix_write_error(const char *what, struct err *e)
{
    bool full = errno == ENOSPC || errno == EDQUOT;
    return err_errno(e, RC_FAILED, EXIT_IO, full ? "store_disk_full" : "store_io", "the cache: %s", what);
}

static bool head_write(int fd, const struct prefix_payload *p)
{
    return lseek(fd, 0, SEEK_SET) == 0 && fd_write_all(fd, &p->h, sizeof p->h) &&
           fd_write_all(fd, p->tokens, tokens_bytes(&p->h)) && fd_write_all(fd, p->checksums, checksums_bytes(&p->h));
}

enum rc prefix_payload_write(int folder_fd, struct prefix_name n, struct prefix_payload *p,
                             void (*item)(void *ctx, uint32_t i, void *out), void *ctx, void *scratch, struct err *e)
{
    char name[PREFIX_NAME_CHARS], unfinished[PREFIX_NAME_CHARS];
    prefix_name_format(n, name);
    unfinished_name(n, unfinished);
    p->h.magic = payload_magic;
    p->h.version = PAYLOAD_VERSION;
    int fd = openat(folder_fd, unfinished, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0) return prefix_write_error("cannot make a file", e);
    bool good = lseek(fd, (off_t)head_bytes(&p->h), SEEK_SET) >= 0;
    for (uint32_t i = 0; good && i < prefix_payload_items(&p->h); i++) {
        item(ctx, i, scratch);
        p->checksums[i] = XXH3_64bits(scratch, p->h.item_bytes);
        good = fd_write_all(fd, scratch, p->h.item_bytes);
    }
    p->h.checksum = head_checksum(p);
    good = good && head_write(fd, p) && fsync(fd) == 0;
    enum rc rc = good ? RC_OK : prefix_write_error("cannot write a file", e);
    if (close(fd) && good) rc = prefix_write_error("cannot write a file", e);
    if (rc == RC_OK && renameat(folder_fd, unfinished, folder_fd, name)) rc = prefix_write_error("cannot name a file", e);
    if (rc != RC_OK) unlinkat(folder_fd, unfinished, 0);
    return rc;
}

/* ---- reading ---- */

static bool read_all(int fd, void *out, size_t n, uint64_t offset)
{
    char *at = out;
    while (n) {
        ssize_t got = pread(fd, at, n, (off_t)offset);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return false;
        at += got, n -= (size_t)got, offset += (uint64_t)got;
    }
    return true;
}

static bool header_possible(const struct prefix_header *h, enum prefix_kind kind, uint64_t file_bytes)
{
    uint64_t bytes;
    if (h->magic != payload_magic || h->version != PAYLOAD_VERSION || h->kind != (uint32_t)kind) return false;
    if (h->n_blocks < 1 || h->n_blocks > PREFIX_FILE_BLOCKS || (kind == PREFIX_STATE && h->n_blocks != 1)) return false;
    if (h->first_block > (uint32_t)INT32_MAX / PREFIX_BLOCK_TOKENS - PREFIX_FILE_BLOCKS) return false;
    return prefix_payload_bytes(h, &bytes) && bytes == file_bytes;
}

static bool head_read(int fd, enum prefix_kind kind, struct prefix_payload *p)
{
    struct stat st;
    if (fstat(fd, &st) || !S_ISREG(st.st_mode)) return false;
    if (!read_all(fd, &p->h, sizeof p->h, 0) || !header_possible(&p->h, kind, (uint64_t)st.st_size)) return false;
    return read_all(fd, p->tokens, tokens_bytes(&p->h), sizeof p->h) &&
           read_all(fd, p->checksums, checksums_bytes(&p->h), sizeof p->h + tokens_bytes(&p->h)) &&
           p->h.checksum == head_checksum(p);
}

enum prefix_verdict prefix_payload_open(int folder_fd, struct prefix_name n, struct prefix_payload *p, int *fd)
{
    char name[PREFIX_NAME_CHARS];
    prefix_name_format(n, name);
    /* A pipe by that name must not block. */
    *fd = openat(folder_fd, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (*fd < 0) return errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == EINTR ? PREFIX_UNREADABLE : PREFIX_WRONG;
    if (head_read(*fd, n.kind, p)) return PREFIX_WHOLE;
    close(*fd);
    return PREFIX_WRONG;
}

bool prefix_payload_item(int fd, const struct prefix_payload *p, uint32_t i, void *out)
{
    uint64_t offset = head_bytes(&p->h) + i * p->h.item_bytes;
    return read_all(fd, out, p->h.item_bytes, offset) && XXH3_64bits(out, p->h.item_bytes) == p->checksums[i];
}
