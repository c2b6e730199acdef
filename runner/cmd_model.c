/* cmd_model: what a model file holds, and what each rank would hold of it.
 *
 * Shares of a rank are stored bytes of its ranges; a backend may lay them out larger. The embedding table is read
 * from the file's map, which all ranks of one machine share, and is named apart. Sizes of keys and values are exact. */
#define _GNU_SOURCE
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "model_config.h"
#include "model_file.h"
#include "options.h"
#include "partition.h"
#include "quant.h"

enum { KV_PAGE = 64 };

static double mib(uint64_t bytes) { return (double)bytes / (1 << 20); }

static void print_head(const struct model_file *m, const struct model_config *c)
{
    printf("architecture  %s: %d layers, width %d, FFN %d, %d query and %d KV heads of %d\n", model_arch_name(c->arch),
           c->n_layers, c->hidden, c->ffn, c->n_heads, c->n_kv_heads, c->head_dim);
    printf("vocabulary    %d%s\n", c->vocab, c->tied ? ", head tied to the embedding" : "");
    printf("context       %d tokens\n", c->context);
    printf("file          %s, %zu tensors\n", model_file_path(m), model_file_tensor_count(m));
}

static void print_formats(const struct model_file *m)
{
    size_t count[QUANT_FORMATS] = {0};
    uint64_t bytes[QUANT_FORMATS] = {0}, all = 0;
    for (size_t i = 0; i < model_file_tensor_count(m); i++) {
        const struct tensor_view *t = model_file_tensor_at(m, i);
        count[t->format]++;
        bytes[t->format] += t->n_bytes;
        all += t->n_bytes;
    }
    for (int f = 0; f < QUANT_FORMATS; f++)
        if (count[f])
            printf("  %-8s %5zu tensors %10.1f MiB\n", quant_name((enum quant_format)f), count[f], mib(bytes[f]));
    printf("  %-8s %5zu tensors %10.1f MiB\n", "all", model_file_tensor_count(m), mib(all));
}

static uint64_t share(uint64_t bytes, struct range part, int whole)
{
    return whole > 0 ? bytes / (uint64_t)whole * (uint64_t)part.count +
                           bytes % (uint64_t)whole * (uint64_t)part.count / (uint64_t)whole
                     : 0;
}

static bool name_has(const struct tensor_view *t, const char *part) { return strstr(t->name, part) != NULL; }

/* Stored bytes of one tensor that a rank loads. */
static uint64_t rank_bytes_of(const struct tensor_view *t, const struct model_config *c, const struct rank_part *part)
{
    if (name_has(t, "attn_q.") || name_has(t, "attn_output.")) return share(t->n_bytes, part->q_heads, c->n_heads);
    if (name_has(t, "attn_k.") || name_has(t, "attn_v.")) return share(t->n_bytes, part->kv_heads, c->n_kv_heads);
    if (name_has(t, "ffn_gate.") || name_has(t, "ffn_up.") || name_has(t, "ffn_down."))
        return share(t->n_bytes, part->ffn, c->ffn);
    if (!strcmp(t->name, "output.weight") || (c->tied && !strcmp(t->name, "token_embd.weight")))
        return share(t->n_bytes, part->vocab, c->vocab);
    return !strcmp(t->name, "token_embd.weight") ? 0 : t->n_bytes;
}

static void print_ranks(const struct options *o, const struct model_file *m, const struct model_config *c,
                        const struct partition *p)
{
    enum kv_format kv = KV_F16;
    kv_format_parse(o->kv, &kv);
    int context = o->context ? o->context : c->context;
    int64_t tokens = o->kv_tokens ? o->kv_tokens : (int64_t)o->active * context;
    tokens = (tokens + KV_PAGE - 1) / KV_PAGE * KV_PAGE;
    printf("\n%d rank%s, keys and values for %" PRId64 " tokens:\n", p->ranks, p->ranks == 1 ? "" : "s", tokens);
    printf("  rank  query heads  KV heads    FFN  vocabulary  weights MiB  KV bytes/token    KV MiB\n");
    for (int r = 0; r < p->ranks; r++) {
        const struct rank_part *part = &p->part[r];
        uint64_t weights = 0;
        for (size_t i = 0; i < model_file_tensor_count(m); i++)
            weights += rank_bytes_of(model_file_tensor_at(m, i), c, part);
        uint64_t per_token =
            (uint64_t)c->n_layers * 2 * (uint64_t)part->kv_heads.count * (uint64_t)c->head_dim * kv_format_bytes(kv);
        printf("  %4d  %11d  %8d  %5d  %10d  %11.1f  %14" PRIu64 "  %8.1f\n", r, part->q_heads.count,
               part->kv_heads.count, part->ffn.count, part->vocab.count, mib(weights), per_token,
               mib(per_token * (uint64_t)tokens));
    }
    const struct tensor_view *embedding = model_file_tensor(m, "token_embd.weight");
    if (embedding) printf("  and %.1f MiB of embeddings, mapped from the file by all ranks\n", mib(embedding->n_bytes));
}

int cmd_model(const struct options *o)
{
    struct err e = {0};
    struct model_file *m = NULL;
    struct model_config c;
    struct partition p;
    char text[1100];
    enum rc rc = model_file_open(o->files[0], &m, &e);
    if (rc == RC_OK) rc = model_config_read(m, &c, &e);
    if (rc == RC_OK) rc = partition_make(&c, o->ranks, PARTITION_FFN_STEP, &p, &e);
    if (rc == RC_OK) {
        print_head(m, &c);
        print_formats(m);
        print_ranks(o, m, &c, &p);
    } else {
        log_line(LOG_ERROR, "%s", err_format(&e, text, sizeof text));
    }
    model_file_close(m);
    return rc == RC_OK ? EXIT_DONE : e.exit_status ? e.exit_status : EXIT_INTERNAL;
}
