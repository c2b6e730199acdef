/* cmd_cache: what a folder of stored prompts holds, whether it is whole, and less of it.
 *
 * A store a rank, each looked at alone; no model is needed. Runs may use the folder at the same time. One line a rank goes to
 * standard output. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "options.h"
#include "prefix_store.h"

struct rank_figures {
    struct prefix_stat stat; /* at the end */
    struct prefix_count read, deleted;
};

static uint64_t now_us(void) { return (uint64_t)time(NULL) * 1000000; }

static enum rc prune(struct prefix_store *s, const struct options *o, struct prefix_count *deleted, struct err *e)
{
    uint64_t target_bytes = o->prune_gib < 0 ? UINT64_MAX : (uint64_t)(o->prune_gib * (double)(1 << 30));
    uint64_t age_us = o->prune_days < 0 ? UINT64_MAX : (uint64_t)(o->prune_days * 86400e6), now = now_us();
    /* Now is never later than the last use, so that 0 days is everything. */
    uint64_t since_us = o->prune_days < 0 ? 0 : o->prune_days == 0 ? UINT64_MAX : now > age_us ? now - age_us : 0;
    return prefix_store_prune(s, target_bytes, since_us, deleted, e);
}

static enum rc rank_work(const struct options *o, int rank, struct rank_figures *f, struct err *e)
{
    const struct prefix_store_options store = {.folder = o->files[1], .rank = rank, .must_exist = true};
    struct prefix_store *s = NULL;
    enum rc rc = prefix_store_open(&store, &s, e);
    if (rc == RC_OK && !strcmp(o->files[0], "verify")) rc = prefix_store_verify(s, &f->read, &f->deleted, e);
    if (rc == RC_OK && !strcmp(o->files[0], "prune")) rc = prune(s, o, &f->deleted, e);
    if (rc == RC_OK) rc = prefix_store_stat(s, &f->stat, e);
    prefix_store_close(s);
    return rc;
}

static void print_json(int rank, const struct rank_figures *f)
{
    printf("%s\"rank-%d\":{\"files\":%" PRIu64 ",\"bytes\":%" PRIu64 ",\"blocks\":%" PRIu64 ",\"states\":%" PRIu64
           ",\"oldest_use_us\":%" PRIu64 ",\"newest_use_us\":%" PRIu64 ",\"deleted_files\":%" PRIu64 ",\"deleted_bytes\":%" PRIu64 "}",
           rank ? "," : "{", rank, f->stat.files, f->stat.bytes, f->stat.blocks, f->stat.states, f->stat.oldest_use_us,
           f->stat.newest_use_us, f->deleted.files, f->deleted.bytes);
}

static void print_text(const char *verb, int rank, const struct rank_figures *f)
{
    printf("rank %d  %" PRIu64 " files, %" PRIu64 " bytes: %" PRIu64 " blocks of %d tokens, %" PRIu64 " states", rank, f->stat.files,
           f->stat.bytes, f->stat.blocks, PREFIX_BLOCK_TOKENS, f->stat.states);
    if (!strcmp(verb, "stat")) {
        if (f->stat.files) printf("; oldest use %.1f days ago", (double)(now_us() - f->stat.oldest_use_us) / 86400e6);
    } else {
        printf("; deleted %" PRIu64 " files, %" PRIu64 " bytes", f->deleted.files, f->deleted.bytes);
    }
    putchar('\n');
}

int cmd_cache(const struct options *o)
{
    struct err e = {0};
    char text[1100];
    bool damaged = false;
    int ranks = 0;
    enum rc rc = RC_OK;
    for (int rank = 0; rank < MAX_RANKS && rc == RC_OK; rank++) {
        struct rank_figures f = {0};
        rc = rank_work(o, rank, &f, &e);
        if (rc != RC_OK) break;
        ranks++;
        damaged = damaged || (!strcmp(o->files[0], "verify") && f.deleted.files);
        if (o->json)
            print_json(rank, &f);
        else
            print_text(o->files[0], rank, &f);
    }
    if (ranks && o->json) puts("}");
    if (rc != RC_OK && !(ranks && !strcmp(e.code, "no_store"))) {
        log_line(LOG_ERROR, "%s", err_format(&e, text, sizeof text));
        return e.exit_status ? e.exit_status : EXIT_INTERNAL;
    }
    return damaged ? EXIT_SOME_FAILED : EXIT_DONE;
}
