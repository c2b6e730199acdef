/* cmd_model: what a model holds, what each rank would hold of it, and what fits into a given memory.
 *
 * Everything comes from headers; no weight is read. Shares of a rank are as loaded by a backend that keeps the stored form;
 * a backend may pad them. The embedding table is read from the file's map, which all ranks of one machine share, and is named
 * apart. Sizes of keys, values and recurrent state are exact. */
#define _GNU_SOURCE
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "engine.h"
#include "model_memory.h"
#include "options.h"
#include "rank_backend.h"

static double mib(uint64_t bytes) { return (double)bytes / (1 << 20); }

static int gdn_layers(const struct model_config *c)
{
    int n = 0;
    for (int l = 0; l < c->n_layers; l++) n += c->gdn[l];
    return n;
}

static void print_head(const struct model_file *m, const struct model_config *c)
{
    const int gdn = gdn_layers(c);
    printf("architecture  %s: %d layers", model_arch_name(c->arch), c->n_layers);
    if (gdn) printf(" (%d attention, %d Gated DeltaNet)", c->n_layers - gdn, gdn);
    printf("%s, width %d, FFN %d\n", c->mtp ? " and one for multi-token prediction" : "", c->hidden, c->ffn);
    printf("attention     %d query and %d KV heads of %d%s\n", c->n_heads, c->n_kv_heads, c->head_dim,
           c->attn_gate ? ", gated" : "");
    if (gdn)
        printf("DeltaNet      %d key heads of %d, %d value heads of %d, convolution over %d\n", c->gdn_k_heads, c->gdn_k_dim,
               c->gdn_v_heads, c->gdn_v_dim, c->conv_width);
    printf("vocabulary    %d%s\n", c->vocab, c->tied ? ", head tied to the embedding" : "");
    printf("context       %d tokens\n", c->context);
    printf("file          %s, %zu tensors%s\n", model_file_path(m), model_file_tensor_count(m),
           model_file_synthetic(m) ? "; weights are made up, answers are noise" : "");
}

/* What tensors are for, in the order of printing. */
enum tensor_class { CLASS_EMBEDDING, CLASS_HEAD, CLASS_ATTENTION, CLASS_GDN, CLASS_MLP, CLASS_MTP, CLASS_VECTORS, CLASSES };
static const char *const class_names[CLASSES] = {"embedding", "head", "attention", "DeltaNet", "MLP", "MTP", "vectors"};

static enum tensor_class class_of(enum model_role role, bool mtp_layer, const struct tensor_view *t)
{
    if (t->matrix.rows == 1 || role == ROLE_GDN_CONV) return CLASS_VECTORS;
    if (mtp_layer) return CLASS_MTP;
    if (role == ROLE_EMBEDDING) return CLASS_EMBEDDING;
    if (role == ROLE_HEAD) return CLASS_HEAD;
    if (role == ROLE_GATE || role == ROLE_UP || role == ROLE_DOWN) return CLASS_MLP;
    return role >= ROLE_GDN_QKV ? CLASS_GDN : CLASS_ATTENTION;
}

static void print_formats(const struct model_file *m, const struct model_config *c)
{
    size_t count[CLASSES][QUANT_FORMATS] = {0}, all_count = 0;
    uint64_t bytes[CLASSES][QUANT_FORMATS] = {0}, all = 0;
    for (int role = 0; role < MODEL_ROLES; role++)
        for (int l = 0; l < (role >= ROLE_MIX_NORM ? c->n_layers + c->mtp : 1); l++) {
            const struct tensor_view *t = model_role_find(m, c, (enum model_role)role, l);
            if (!t) continue;
            const enum tensor_class k = class_of((enum model_role)role, role >= ROLE_MIX_NORM && l == c->n_layers, t);
            count[k][t->format]++;
            bytes[k][t->format] += t->n_bytes;
            all_count++;
            all += t->n_bytes;
        }
    for (int k = 0; k < CLASSES; k++)
        for (int f = 0; f < QUANT_FORMATS; f++)
            if (count[k][f])
                printf("  %-10s %-8s %5zu tensors %10.1f MiB\n", class_names[k], quant_name((enum quant_format)f), count[k][f],
                       mib(bytes[k][f]));
    printf("  %-10s %-8s %5zu tensors %10.1f MiB\n", "all", "", all_count, mib(all));
}

static void print_ranks(const struct options *o, const struct model_file *m, const struct model_config *c,
                        const struct partition *p, const struct engine_limits *limits)
{
    struct model_memory_options mo = {.mtp = c->mtp,
                                      .weights = strcmp(o->weights, "w8") ? KERN_WEIGHTS_NATIVE : KERN_WEIGHTS_W8,
                                      .rows = rank_backend_prefill_rows(o) + o->active * (1 + o->drafts),
                                      .picks = o->active * (1 + o->drafts)};
    kv_format_parse(o->kv, &mo.kv);
    printf("\n%d rank%s, keys and values for %" PRId64 " tokens as %s, %d sequence%s at once, weights %s:\n", p->ranks,
           p->ranks == 1 ? "" : "s", limits->kv_tokens, kv_format_name(mo.kv), o->active, o->active == 1 ? "" : "s",
           mo.weights == KERN_WEIGHTS_W8 ? "as 8-bit integers" : "as stored");
    printf("  rank  heads q/kv  DeltaNet k/v    FFN  vocabulary  weights MiB  KV bytes/token    KV MiB  state MiB  work MiB\n");
    int64_t fits = INT64_MAX;
    for (int r = 0; r < p->ranks; r++) {
        const struct rank_part *part = &p->part[r];
        const struct rank_memory b = model_memory_of_rank(m, c, part, &mo);
        printf("  %4d  %7d/%-2d  %9d/%-2d  %5d  %10d  %11.1f  %14" PRIu64 "  %8.1f  %9.1f  %8.1f\n", r, part->q_heads.count,
               part->kv_heads.count, part->gdn_k_heads.count, part->gdn_v_heads.count, part->ffn.count, part->vocab.count,
               mib(b.weight_bytes), b.kv_token_bytes, mib(b.kv_token_bytes * (uint64_t)limits->kv_tokens),
               mib(b.state_bytes * (uint64_t)o->active), mib(b.work_bytes));
        const int64_t context = model_memory_context(&b, o->active, (uint64_t)(o->memory_gib * (double)(1 << 30)));
        if (context < fits) fits = context;
    }
    const struct tensor_view *embedding = model_role_find(m, c, ROLE_EMBEDDING, 0);
    if (embedding) printf("  and %.1f MiB of embeddings, mapped from the file by all ranks\n", mib(embedding->n_bytes));
    if (!o->memory_gib) return;
    if (fits > c->context) fits = c->context;
    if (fits)
        printf("%g GiB a rank: %d sequence%s of %" PRId64 " tokens%s\n", o->memory_gib, o->active, o->active == 1 ? "" : "s",
               fits, fits == c->context ? ", the model's context" : "");
    else
        printf("%g GiB a rank: the model does not fit\n", o->memory_gib);
}

int cmd_model(const struct options *o)
{
    struct err e = {0};
    struct model_file *m = NULL;
    struct model_config c;
    struct partition p;
    struct engine_limits limits;
    struct rank_backend backend;
    const struct engine_options eo = {.ranks = o->ranks, .active = o->active, .context = o->context, .kv_tokens = o->kv_tokens};
    char text[1100];
    enum rc rc = model_file_open(o->files[0], &m, &e);
    if (rc == RC_OK) rc = model_config_read(m, &c, &e);
    if (rc == RC_OK) rc = partition_make(&c, o->ranks, PARTITION_FFN_STEP, &p, &e);
    if (rc == RC_OK) rc = engine_limits_plan(&eo, m, &limits, &e);
    if (rc == RC_OK) rc = rank_backend_choose(o, 0, &backend, &e);
    if (rc == RC_OK) {
        print_head(m, &c);
        print_formats(m, &c);
        print_ranks(o, m, &c, &p, &limits);
        printf("computed by   %s (%s)\n", backend.cuda ? backend.numerics : "the CPU", backend.why);
    } else {
        log_line(LOG_ERROR, "%s", err_format(&e, text, sizeof text));
    }
    model_file_close(m);
    return rc == RC_OK ? EXIT_DONE : e.exit_status ? e.exit_status : EXIT_INTERNAL;
}
