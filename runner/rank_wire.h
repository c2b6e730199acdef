/* rank_wire: frames between runner and ranks over a socketpair.
 *
 * A frame is u32 length (of what follows), u16 type, then fields, little-endian, strings and arrays as u32 count + elements.
 * Byte layout in schemas/rank_wire.md. Decoding is bounded and checked: a frame that is too long, short or has bytes left
 * over is RC_BAD_INPUT, and the peer is treated as dead. */
#ifndef TANDEM_RANK_WIRE_H
#define TANDEM_RANK_WIRE_H

#include "base.h"
#include "engine.h"

enum { WIRE_MAX_FRAME_BYTES = 64 << 20, WIRE_VERSION = 4 };

enum wire_type {
    WIRE_HELLO = 1,  /* rank -> runner, once loaded */
    WIRE_SUBMIT,     /* runner -> every rank, same order */
    WIRE_CANCEL,     /* runner -> rank 0 */
    WIRE_SHUTDOWN,   /* runner -> every rank */
    WIRE_TOKEN,      /* rank 0 -> runner: progress, at most one frame a step */
    WIRE_DONE,       /* rank 0 -> runner */
    WIRE_FAILED,     /* rank 0 -> runner: this request failed, the rank goes on */
    WIRE_STATS,      /* rank -> runner, before leaving and when asked by SHUTDOWN */
    WIRE_ERROR,      /* rank -> runner: last words */
    WIRE_STARTED,    /* rank 0 -> runner: the first row of this request was computed */
    WIRE_SAVED,      /* rank 0 -> runner: every rank has this request on disk up to a position */
    WIRE_STOP,       /* runner -> rank 0: compute no more, save what runs */
    WIRE_STOPPED     /* rank 0 -> runner: that is done */
};

struct wire_hello {
    uint32_t version, rank, ranks;
    uint32_t context;
    uint64_t partition_digest, kv_tokens, weight_bytes, kv_bytes, load_us;
    char identity[2048];
};
struct wire_done {
    uint64_t id;
    uint32_t finish; /* enum finish_reason */
    uint64_t prompt_tokens;
    struct engine_timing timing;
    const char *text;
    size_t text_len;
    const int32_t *tokens;
    size_t n_tokens;
    const uint64_t *trace; /* [n_tokens][2] or NULL */
};
struct wire_token {
    uint64_t step;
    uint64_t tokens_total; /* sampled since the rank started */
    uint64_t prefill_total;
};
struct wire_saved {
    uint64_t id;
    uint32_t position;
};
struct wire_text { /* FAILED (id, code, text), ERROR (id 0, code, text, exit status) */
    uint64_t id;
    uint32_t exit_status;
    char code[40];
    char text[600];
};

/* One decoded frame. Pointers point into the bytes given to wire_decode, arrays into storage owned by `store`. */
struct wire_frame {
    enum wire_type type;
    union {
        struct wire_hello hello;
        struct engine_request submit;
        uint64_t cancel, started; /* ids */
        struct wire_token token;
        struct wire_done done;
        struct wire_saved saved;
        struct wire_text text;
        struct engine_stats stats;
    } u;
    struct buf store; /* wire_frame_free */
};

/* Appends one encoded frame to out. */
bool wire_encode(const struct wire_frame *f, struct buf *out);
/* Decodes the first frame of bytes. RC_OK: *used says how many bytes it took; RC_RETRY: more bytes are needed;
 * RC_BAD_INPUT: broken. */
enum rc wire_decode(const void *bytes, size_t n_bytes, struct wire_frame *out, size_t *used, struct err *e);
void wire_frame_free(struct wire_frame *f);

#endif
