/* The exactness contract, ranks as threads: a request's tokens and traces are the same bits alone or batched, reversed, under
 * preemption, with drafts or without, stopped and resumed or not, however its prompt is cut and whatever the thread count; every
 * rank count repeats itself. On a tiny model of random weights, and on a trained model given as the first argument.
 *
 * The second argument is the backend. On CUDA, where there is one rank in a process, also: replayed from recordings or launched
 * kernel by kernel. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "checkpoint_store.h"
#include "engine_group.h"
#include "tiny_gguf.h"
#include "tokenizer.h"

enum { N_REQUESTS = 5, TRAINED_REQUESTS = 4, MAX_PROMPT = 400 };

struct fixture {
    const char *model;
    char tiny[64];
    bool trained; /* a model whose drafts are often right; it is slower, too */
    int n, ranks; /* requests, most ranks */
    enum group_backend backend;
    struct engine_group_result alone[MAX_RANKS + 1][KV_FORMATS][N_REQUESTS]; /* see alone_of */
    int32_t prompts[N_REQUESTS][MAX_PROMPT];
    struct engine_request requests[N_REQUESTS];
};
static const char *model_argument;
static enum group_backend backend_argument;

/* Two greedy requests, three sampled ones, the second of them with penalties. */
static void make_request(struct fixture *f, int i, int prompt_tokens, int max_tokens)
{
    struct sampling sampling = sampling_default();
    sampling.seed = 1000 + (uint64_t)i;
    sampling.temperature = i < 2 ? 0 : i < 4 ? 0.2f : 0.4f;
    if (i == 4) sampling.top_p = 0.9f, sampling.top_k = 40;
    if (i == 3) sampling.repetition_penalty = 1.05f, sampling.presence_penalty = 0.1f, sampling.frequency_penalty = 0.02f;
    f->requests[i] = (struct engine_request){.id = 10 + (uint64_t)i, .prompt = f->prompts[i],
                                             .prompt_tokens = (size_t)prompt_tokens, .max_tokens = max_tokens,
                                             .sampling = sampling, .ignore_end = true};
}

/* Prompts that end on, before and after block borders, and repeat themselves. */
static int setup_tiny(struct fixture *f)
{
    static const int prompt_tokens[N_REQUESTS] = {64, 1, 200, 383, 127}, max_tokens[N_REQUESTS] = {260, 300, 256, 270, 257};
    snprintf(f->tiny, sizeof f->tiny, "/tmp/tandem-exactness-%d.gguf", getpid());
    struct tiny_gguf t = tiny_gguf_default();
    if (!tiny_gguf_write(&t, f->tiny)) return -1;
    f->model = f->tiny;
    f->n = N_REQUESTS;
    f->ranks = 4;
    for (int i = 0; i < N_REQUESTS; i++) {
        for (int j = 0; j < prompt_tokens[i]; j++) f->prompts[i][j] = 3 + (i * 7919 + j * 31 + j * j) % 256;
        make_request(f, i, prompt_tokens[i], max_tokens[i]);
    }
    return 0;
}

/* Package descriptions of the kind that hybrid-small was trained on. */
static int setup_trained(struct fixture *f)
{
    static const char *const texts[TRAINED_REQUESTS] = {
        "Summarize this package description in one short line.\n\n"
        "A small library that reads and writes archives. This package contains the shared library. The archives may be "
        "compressed, and the library finds out by itself how. It can be used from C and from C++ programs. This package "
        "contains the shared library and nothing else; see libarc-dev for the headers.",
        "Extract the package, its section and its dependencies as compact JSON.\n\n"
        "Package: libarc-tools\nSection: utils\nDepends: libarc1, libc6, zlib1g, liblzma5\n"
        "Description: command line tools for small archives. They list, read and write archives.",
        "Extract the package, its section and its dependencies as compact JSON.\n\n"
        "Package: python3-arc\nSection: python\nDepends: python3, libarc1, libc6\n"
        "Description: Python bindings of the archive library. This package contains the module for Python.",
        "Summarize this package description in one short line.\n\n"
        "Documentation of the archive library in HTML. It has a tutorial, a reference of all functions, and examples.",
    };
    struct model_file *m = NULL;
    struct tokenizer *t = NULL;
    struct err e = {0};
    enum rc rc = model_file_open(f->model, &m, &e);
    if (rc == RC_OK) rc = tokenizer_open(m, &t, &e);
    for (int i = 0; i < TRAINED_REQUESTS && rc == RC_OK; i++) {
        struct token_list ids = {0};
        char prompt[1024];
        snprintf(prompt, sizeof prompt, "<|im_start|>user\n%s<|im_end|>\n<|im_start|>assistant\n", texts[i]);
        rc = tokenizer_encode(t, prompt, strlen(prompt), true, &ids, &e);
        if (rc == RC_OK && ids.len > MAX_PROMPT) rc = RC_FAILED;
        for (size_t j = 0; j < ids.len && rc == RC_OK; j++) f->prompts[i][j] = ids.ids[j];
        make_request(f, i, (int)ids.len, 256 + 3 * i);
        token_list_free(&ids);
    }
    tokenizer_close(t);
    model_file_close(m);
    if (rc != RC_OK) print_error("%s: %s\n", e.code, e.text);
    f->n = TRAINED_REQUESTS;
    f->ranks = 2;
    f->trained = true;
    return rc == RC_OK ? 0 : -1;
}

static int setup(void **state)
{
    struct fixture *f = calloc(1, sizeof *f);
    *state = f;
    f->model = model_argument;
    f->backend = backend_argument;
    const int status = model_argument ? setup_trained(f) : setup_tiny(f);
    if (f->backend != GROUP_CPU) f->ranks = 1;
    return status;
}

static int teardown(void **state)
{
    struct fixture *f = *state;
    if (f->tiny[0]) unlink(f->tiny);
    for (int ranks = 1; ranks <= MAX_RANKS; ranks++)
        for (int kv = 0; kv < KV_FORMATS; kv++) engine_group_free(f->alone[ranks][kv], N_REQUESTS);
    free(f);
    return 0;
}

static struct engine_group group_of(const struct fixture *f, int ranks, enum kv_format kv)
{
    struct engine_options o = {.model_path = f->model, .ranks = ranks, .active = 4, .context = 1024, .kv = kv, .trace = true};
    return (struct engine_group){.options = o, .backend = f->backend, .threads = 1, .bounds = lockstep_bounds_default()};
}

static int two_ranks(const struct fixture *f) { return f->ranks < 2 ? f->ranks : 2; }

static void run(struct engine_group *g, const struct engine_request *requests, size_t n, struct engine_group_result *out)
{
    if (!engine_group_run(g, requests, n, out)) {
        for (int r = 0; r < g->options.ranks; r++) print_error("rank %d: %s: %s\n", r, g->err[r].code, g->err[r].text);
        fail();
    }
}

static void assert_same(const struct engine_group_result *a, const struct engine_group_result *b)
{
    assert_int_equal(a->kind, ENGINE_EVENT_DONE);
    assert_int_equal(b->kind, ENGINE_EVENT_DONE);
    assert_int_equal(a->n_tokens, b->n_tokens);
    assert_int_equal(a->finish, b->finish);
    for (size_t i = 0; i < a->n_tokens; i++) {
        if (a->tokens[i] != b->tokens[i] || a->trace[2 * i] != b->trace[2 * i] || a->trace[2 * i + 1] != b->trace[2 * i + 1])
            fail_msg("token %zu of %zu differs", i, a->n_tokens);
    }
    assert_string_equal(a->text, b->text);
    assert_int_equal(b->timing.rounds + b->timing.accepted + 1, b->n_tokens);
}

static void assert_all_same(const struct fixture *f, const struct engine_group_result *a, const struct engine_group_result *b)
{
    for (int i = 0; i < f->n; i++) {
        assert_true(a[i].n_tokens >= 256);
        assert_same(&a[i], &b[i]);
    }
}

/* The drafts that decided nothing were there: right ones and wrong ones. */
static void assert_drafted(const struct engine_group *g)
{
    assert_true(g->stats.accepted > 0);
    assert_true(g->stats.drafted > g->stats.accepted);
}

/* The yardstick: each request alone, without drafts. Run once for all tests. */
static const struct engine_group_result *alone_of(struct fixture *f, int ranks, enum kv_format kv)
{
    struct engine_group_result *out = f->alone[ranks][kv];
    for (int i = 0; i < f->n && !out[i].tokens; i++) {
        struct engine_group g = group_of(f, ranks, kv);
        g.options.spec = SPEC_OFF;
        run(&g, &f->requests[i], 1, &out[i]);
        assert_int_equal(g.stats.max_sequences_in_step, 1);
        assert_int_equal(g.stats.drafted, 0);
    }
    return out;
}

static void test_alone_batched_reversed(void **state)
{
    struct fixture *f = *state;
    for (int ranks = 1; ranks <= f->ranks; ranks++) {
        const struct engine_group_result *alone = alone_of(f, ranks, KV_F16);
        struct engine_group_result batched[N_REQUESTS];
        struct engine_group g = group_of(f, ranks, KV_F16);
        run(&g, f->requests, (size_t)f->n, batched);
        assert_true(g.stats.max_sequences_in_step >= 3);
        assert_drafted(&g);
        assert_all_same(f, alone, batched);
        engine_group_free(batched, (size_t)f->n);

        struct engine_request reversed[N_REQUESTS];
        struct engine_group_result back[N_REQUESTS];
        for (int i = 0; i < f->n; i++) reversed[i] = f->requests[f->n - 1 - i];
        g.options.drafts = KERN_MAX_DRAFTS;
        g.options.active = 3; /* slots are used again */
        run(&g, reversed, (size_t)f->n, back);
        for (int i = 0; i < f->n; i++) batched[i] = back[f->n - 1 - i];
        assert_all_same(f, alone, batched);
        engine_group_free(batched, (size_t)f->n);
    }
}

/* Where no trace needs them, logits of greedy rows stay with the backend, which finds the best token itself: the same. */
static void test_without_traces(void **state)
{
    struct fixture *f = *state;
    struct engine_group_result out[N_REQUESTS];
    for (int ranks = 1; ranks <= two_ranks(f); ranks++) {
        const struct engine_group_result *alone = alone_of(f, ranks, KV_F16);
        struct engine_group g = group_of(f, ranks, KV_F16);
        g.options.trace = false;
        run(&g, f->requests, (size_t)f->n, out);
        for (int i = 0; i < f->n; i++) {
            assert_int_equal(out[i].n_tokens, alone[i].n_tokens);
            assert_memory_equal(out[i].tokens, alone[i].tokens, alone[i].n_tokens * sizeof *alone[i].tokens);
            assert_string_equal(out[i].text, alone[i].text);
        }
        engine_group_free(out, (size_t)f->n);
    }
}

/* Every request alone with every source of drafts: greedy, sampled and penalized ones all have right and wrong drafts. */
static void test_drafts_alone(void **state)
{
    struct fixture *f = *state;
    const struct engine_group_result *alone = alone_of(f, 1, KV_F16);
    struct engine_group_result drafted;
    for (enum spec_mode spec = f->trained ? SPEC_MTP : SPEC_NGRAM; spec <= SPEC_NGRAM; spec++) {
        int64_t n_drafted = 0, accepted = 0;
        for (int i = 0; i < f->n; i++) {
            struct engine_group g = group_of(f, 1, KV_F16);
            g.options.spec = spec;
            run(&g, &f->requests[i], 1, &drafted);
            assert_same(&alone[i], &drafted);
            n_drafted += drafted.timing.drafted;
            accepted += drafted.timing.accepted;
            engine_group_free(&drafted, 1);
        }
        assert_true(n_drafted > accepted && accepted > 0);
        if (spec == SPEC_MTP) assert_true((double)accepted > 0.3 * (double)n_drafted);
    }
}

static void test_preemption_and_prompt_cuts(void **state)
{
    struct fixture *f = *state;
    static const int prefill_rows[] = {64, 1024, 128};
    struct engine_group_result batched[N_REQUESTS];
    for (int kv = 0; kv < (f->trained ? 1 : KV_FORMATS); kv++) {
        const struct engine_group_result *alone = alone_of(f, two_ranks(f), (enum kv_format)kv);
        for (int c = 0; c < (f->trained ? 2 : 3); c++) {
            struct engine_group g = group_of(f, two_ranks(f), (enum kv_format)kv);
            g.options.prefill_rows = prefill_rows[c];
            g.options.spec = f->trained && c ? SPEC_MTP : SPEC_AUTO;
            g.options.context = 704;
            g.options.kv_tokens = 832; /* together they need far more */
            run(&g, f->requests, (size_t)f->n, batched);
            assert_true(g.stats.preemptions > 0);
            assert_drafted(&g);
            assert_all_same(f, alone, batched);
            engine_group_free(batched, (size_t)f->n);
        }
    }
}

static void test_threads(void **state)
{
    struct fixture *f = *state;
    if (f->trained || f->backend != GROUP_CPU) skip();
    struct engine_group_result three[N_REQUESTS];
    struct engine_group g = group_of(f, 1, KV_F16);
    g.threads = 3;
    run(&g, f->requests, (size_t)f->n, three);
    assert_all_same(f, alone_of(f, 1, KV_F16), three);
    engine_group_free(three, (size_t)f->n);
}

/* A replayed round and one launched kernel by kernel are the same bits: alone, and beside others with drafts, which takes
 * rounds of many shapes. With the yardstick of the same KV format from the backend that was asked for. */
static void test_recordings(void **state)
{
    struct fixture *f = *state;
    static const enum kv_format formats[] = {KV_F16, KV_INT8};
    struct engine_group_result out[N_REQUESTS];
    if (f->backend == GROUP_CPU) skip();
    for (int i = 0; i < 4; i++) {
        const struct engine_group_result *alone = alone_of(f, 1, formats[i / 2]);
        struct engine_group g = group_of(f, 1, formats[i / 2]);
        g.backend = i % 2 ? GROUP_CUDA_PLAIN : GROUP_CUDA;
        g.options.drafts = KERN_MAX_DRAFTS;
        run(&g, f->requests, (size_t)f->n, out);
        assert_drafted(&g);
        assert_all_same(f, alone, out);
        assert_int_equal(g.replays > 0, g.backend == GROUP_CUDA);
        engine_group_free(out, (size_t)f->n);
        g.options.spec = SPEC_OFF;
        for (int j = 0; j < f->n; j++) {
            run(&g, &f->requests[j], 1, out);
            assert_same(&alone[j], out);
            assert_int_equal(g.replays > 100, g.backend == GROUP_CUDA); /* most of its 256 rounds and more */
            engine_group_free(out, 1);
        }
    }
}

/* Ranks add in different orders, so texts may part at a near-tie; the first greedy tokens must not. */
static void test_rank_counts_agree(void **state)
{
    struct fixture *f = *state;
    if (f->ranks < 2) skip();
    const struct engine_group_result *one = alone_of(f, 1, KV_F16);
    for (int ranks = 2; ranks <= f->ranks; ranks++)
        assert_memory_equal(one->tokens, alone_of(f, ranks, KV_F16)->tokens, 32 * sizeof *one->tokens);
}

static size_t ascii_run(const char *text)
{
    size_t n = 0;
    while (text[n] > 0) n++;
    return n;
}

/* Ends the request by a stop string that the whole answer contains, without drafts and with. Returns how many right drafts were
 * no part of the answer. */
static uint64_t stop_at(const struct fixture *f, struct engine_request r, const char *stop, const char *whole)
{
    struct engine_group_result plain, cut;
    struct engine_group g = group_of(f, two_ranks(f), KV_F16);
    const char *stops[] = {"never to be seen", stop}, *first = strstr(whole, stop);
    r.stop = stops;
    r.n_stop = 2;
    g.options.spec = SPEC_OFF;
    run(&g, &r, 1, &plain);
    g.options.spec = SPEC_AUTO;
    g.options.drafts = KERN_MAX_DRAFTS;
    run(&g, &r, 1, &cut);
    assert_same(&plain, &cut);
    assert_int_equal(cut.finish, FINISH_STOP);
    if (first == whole || first[-1] > 0) /* else half a character may have been left out */
        assert_int_equal(strlen(cut.text), (size_t)(first - whole));
    assert_memory_equal(cut.text, whole, strlen(cut.text));
    uint64_t beyond = g.stats.accepted - (uint64_t)cut.timing.accepted;
    engine_group_free(&plain, 1);
    engine_group_free(&cut, 1);
    return beyond;
}

/* Stop strings end a request exactly before their first occurrence, wherever token borders and rounds lie; what a round sampled
 * beyond is no part of the answer. The tiny model is given a prompt that it answers with repeated ASCII text. */
static void test_stop_strings(void **state)
{
    struct fixture *f = *state;
    struct engine_group_result whole;
    struct engine_group g = group_of(f, two_ranks(f), KV_F16);
    struct engine_request r = f->requests[1];
    int32_t prompt[32];
    for (int i = 0; i < 32; i++) prompt[i] = 3 + 'a' + i % 3 * 3;
    if (!f->trained) r.prompt = prompt, r.prompt_tokens = 32;
    run(&g, &r, 1, &whole);
    size_t len = strlen(whole.text), at = len / 8;
    uint64_t beyond = 0;
    int tried = 0;
    for (; tried < 12; tried++, at += len / 20) {
        while (whole.text[at] && ascii_run(whole.text + at) < 3) at++;
        if (!whole.text[at]) break;
        size_t n = ascii_run(whole.text + at), most = tried % 2 ? 24 : 3;
        char stop[25];
        snprintf(stop, sizeof stop, "%.*s", (int)(n < most ? n : most), whole.text + at);
        beyond += stop_at(f, r, stop, whole.text);
    }
    assert_true(tried >= 4);
    assert_true(beyond > 0);
    engine_group_free(&whole, 1);
}

/* End tokens end a request within a round, too, on every rank. */
static void test_end_tokens(void **state)
{
    struct fixture *f = *state;
    struct engine_group_result plain[N_REQUESTS], drafted[N_REQUESTS];
    struct engine_request requests[N_REQUESTS];
    struct engine_group g = group_of(f, two_ranks(f), KV_F16);
    int ended = 0;
    for (int i = 0; i < f->n; i++) {
        requests[i] = f->requests[i];
        requests[i].ignore_end = false;
    }
    g.options.spec = SPEC_OFF;
    run(&g, requests, (size_t)f->n, plain);
    g.options.spec = SPEC_AUTO;
    g.options.drafts = KERN_MAX_DRAFTS;
    run(&g, requests, (size_t)f->n, drafted);
    for (int i = 0; i < f->n; i++) {
        assert_same(&plain[i], &drafted[i]);
        ended += drafted[i].finish == FINISH_STOP;
    }
    assert_true(ended > 0);
    engine_group_free(drafted, (size_t)f->n);
    /* On its own task 99% of the trained model's first drafts are right; of an MTP layer that has not seen the prompt, 30%. */
    if (f->trained) {
        g.options.spec = SPEC_MTP;
        g.options.drafts = 1;
        run(&g, &requests[1], 1, drafted);
        assert_same(&plain[1], drafted);
        assert_true(drafted[0].timing.drafted > 10);
        assert_true((double)drafted[0].timing.accepted > 0.8 * (double)drafted[0].timing.drafted);
        engine_group_free(drafted, 1);
    }
    engine_group_free(plain, (size_t)f->n);
}

/* ---- checkpoints ---- */

/* Requests with keys, in a folder of their own. */
struct checkpointed {
    const struct fixture *fixture;
    char folder[64];
    struct engine_request requests[N_REQUESTS];
    struct engine_group group;
};

static bool keep_none(void *ctx, const unsigned char key[CHECKPOINT_KEY_BYTES]) { return (void)ctx, (void)key, false; }

static void checkpointed_open(struct checkpointed *c, const struct fixture *f, int ranks, enum spec_mode spec)
{
    memset(c, 0, sizeof *c);
    c->fixture = f;
    snprintf(c->folder, sizeof c->folder, "/tmp/tandem-checkpoints-%d", getpid());
    checkpoint_sweep(c->folder, keep_none, NULL);
    memcpy(c->requests, f->requests, sizeof c->requests);
    for (int i = 0; i < f->n; i++) memset(c->requests[i].key, 0x10 + i, sizeof c->requests[i].key);
    c->group = group_of(f, ranks, KV_F16);
    c->group.options.spec = spec;
    c->group.options.prefill_rows = 64;
    c->group.options.checkpoint_us = 1; /* after every step, as fast as the disk goes */
    c->group.checkpoints = c->folder;
}

static void checkpointed_close(struct checkpointed *c) { checkpoint_sweep(c->folder, keep_none, NULL); }

/* Runs what out has no answer of; from checkpoints if there are any. Returns the positions that came from them. */
static int64_t go_on(struct checkpointed *c, uint64_t stop_step, uint64_t leave_step, bool resume, struct engine_group_result *out)
{
    struct engine_request left[N_REQUESTS] = {0};
    struct engine_group_result results[N_REQUESTS];
    int index[N_REQUESTS], n = 0, done = 0;
    int64_t resumed = 0;
    for (int i = 0; i < c->fixture->n; i++) {
        if (out[i].n_tokens) continue;
        left[n] = c->requests[i];
        left[n].resume = resume;
        index[n++] = i;
    }
    c->group.stop_step = stop_step;
    c->group.leave_step = leave_step;
    run(&c->group, left, (size_t)n, results);
    for (int i = 0; i < n; i++) {
        out[index[i]] = results[i];
        done += results[i].n_tokens > 0;
        resumed += results[i].timing.resumed_tokens;
    }
    assert_int_equal(c->group.stopped, stop_step && done < n);
    return resumed;
}

/* Stopped in prompts and in answers, again and again, with and without drafts: the same bits as undisturbed, and each part goes on where
 * the one before it ended. */
static void test_stopped_and_resumed(void **state)
{
    struct fixture *f = *state;
    const int most = f->trained ? 2 : 3;
    for (int ranks = f->trained ? two_ranks(f) : 1; ranks <= most && ranks <= f->ranks; ranks++) {
        static const uint64_t tiny_stops[] = {2, 5, 40, 9, 120}, trained_stops[] = {2, 5, 20, 9, 25};
        const uint64_t *stops = f->trained ? trained_stops : tiny_stops;
        const struct engine_group_result *alone = alone_of(f, ranks, KV_F16);
        struct engine_group_result out[N_REQUESTS] = {0};
        struct checkpointed c;
        checkpointed_open(&c, f, ranks, f->trained ? SPEC_MTP : ranks % 2 ? SPEC_OFF : SPEC_NGRAM);
        for (size_t i = 0; i < sizeof tiny_stops / sizeof *tiny_stops; i++) {
            go_on(&c, stops[i], 0, i > 0, out);
            if (i) assert_true(c.group.stats.prefill_rows < 64 * stops[i] + 1);
        }
        const int64_t resumed = go_on(&c, 0, 0, true, out);
        assert_true(resumed > 400);
        assert_all_same(f, alone, out);
        engine_group_free(out, (size_t)f->n);
        checkpointed_close(&c);
    }
}

/* Ranks that stop and, going on, vanish leave what was saved by then. One rank's file is then damaged, cut or gone: the point before it serves, or none,
 * and nobody can tell from the answer. */
static void test_vanished_and_damaged(void **state)
{
    struct fixture *f = *state;
    const int ranks = two_ranks(f);
    const struct engine_group_result *alone = alone_of(f, ranks, KV_F16);
    static const char *const files[] = {"a", "b", "pages"};
    int64_t whole = 0, least = INT64_MAX;
    for (int damage = -1; damage < 9; damage += f->trained ? 2 : 1) {
        struct engine_group_result out[N_REQUESTS] = {0};
        struct checkpointed c;
        char path[256], key[2 * CHECKPOINT_KEY_BYTES + 1];
        checkpointed_open(&c, f, ranks, f->trained ? SPEC_MTP : SPEC_OFF);
        go_on(&c, 12, 0, false, out);
        assert_true(c.group.saved > 0);
        go_on(&c, 0, 12, true, out);
        for (int i = 0; i < 2 * CHECKPOINT_KEY_BYTES; i++) key[i] = "10"[i % 2];
        key[2 * CHECKPOINT_KEY_BYTES] = '\0'; /* of the first request */
        snprintf(path, sizeof path, "%s/%s.r%d.%s", c.folder, key, ranks - 1, files[damage < 0 ? 0 : damage % 3]);
        if (damage >= 0 && damage < 3) {
            FILE *file = fopen(path, "r+b");
            assert_non_null(file);
            fseek(file, damage == 2 ? 100 : -9, damage == 2 ? SEEK_SET : SEEK_END);
            const int byte = fgetc(file);
            fseek(file, -1, SEEK_CUR);
            fputc(byte ^ 4, file);
            fclose(file);
        } else if (damage >= 3 && damage < 6) {
            assert_int_equal(truncate(path, damage == 3 ? 20 : 200), 0);
        } else if (damage >= 6) {
            assert_int_equal(unlink(path), 0);
        }
        struct engine_request first = c.requests[0];
        struct engine_group_result result;
        first.resume = true;
        c.group.leave_step = 0;
        run(&c.group, &first, 1, &result);
        assert_same(&alone[0], &result);
        if (damage < 0) whole = result.timing.resumed_tokens;
        if (result.timing.resumed_tokens < least) least = result.timing.resumed_tokens;
        engine_group_free(&result, 1);
        engine_group_free(out, (size_t)f->n);
        checkpointed_close(&c);
    }
    assert_true(whole > 64);
    assert_int_equal(least, 0); /* without pages there is nothing to go on from */
}

/* A checkpoint is not used by a request that has to be computed cold, nor by another of the same key, nor under another format. */
static void test_unused_checkpoints(void **state)
{
    struct fixture *f = *state;
    const int ranks = two_ranks(f);
    const struct engine_group_result *alone = alone_of(f, ranks, KV_F16);
    for (int how = 0; how < 4; how++) {
        struct engine_group_result out[N_REQUESTS] = {0}, result;
        struct checkpointed c;
        checkpointed_open(&c, f, ranks, SPEC_OFF);
        go_on(&c, 12, 0, false, out);
        struct engine_request first = c.requests[0];
        int32_t prompt[MAX_PROMPT];
        memcpy(prompt, first.prompt, first.prompt_tokens * sizeof *prompt);
        first.prompt = prompt;
        first.resume = true;
        first.cold = how == 0;
        if (how == 1) prompt[0] ^= 1;
        if (how == 2) c.group.options.kv = KV_F32;
        if (how == 3) memset(first.key, 0, sizeof first.key);
        c.group.stop_step = 0;
        run(&c.group, &first, 1, &result);
        assert_int_equal(result.timing.resumed_tokens, 0);
        assert_int_equal(c.group.stats.prefill_rows, first.prompt_tokens);
        if (how == 0 || how == 3) assert_same(&alone[0], &result);
        engine_group_free(&result, 1);
        engine_group_free(out, (size_t)f->n);
        checkpointed_close(&c);
    }
}

/* Preempted when it stops, and restored from there into too few pages again. */
static void test_checkpoints_of_preempted(void **state)
{
    struct fixture *f = *state;
    const int ranks = two_ranks(f);
    const struct engine_group_result *alone = alone_of(f, ranks, KV_F16);
    struct engine_group_result out[N_REQUESTS] = {0};
    struct checkpointed c;
    checkpointed_open(&c, f, ranks, SPEC_OFF);
    c.group.options.context = 704;
    c.group.options.kv_tokens = 832;
    uint64_t preemptions = 0;
    int64_t resumed = 0;
    for (uint64_t stop = 100; stop < 140; stop += 13) {
        resumed += go_on(&c, stop, 0, stop > 100, out);
        preemptions += c.group.stats.preemptions;
    }
    resumed += go_on(&c, 0, 0, true, out);
    assert_true(resumed > 0);
    assert_true(preemptions + c.group.stats.preemptions > 0);
    assert_all_same(f, alone, out);
    engine_group_free(out, (size_t)f->n);
    checkpointed_close(&c);
}

/* A source of drafts that the model does not have. */
static void test_mtp_is_refused(void **state)
{
    struct fixture *f = *state;
    struct engine_group_result none;
    struct engine_group g = group_of(f, 1, KV_F16);
    if (f->trained) skip();
    g.options.spec = SPEC_MTP;
    assert_false(engine_group_run(&g, f->requests, 1, &none));
    assert_string_equal(g.err[0].code, "no_mtp");
    assert_int_equal(g.err[0].exit_status, EXIT_CONFIG);
}

/* Faults that leave the process alive are found by the compare of the very step, on either rank. */
static void test_disagreement_is_found(void **state)
{
    struct fixture *f = *state;
    static const enum fault_kind kinds[] = {FAULT_TOKEN, FAULT_STATE, FAULT_PLAN};
    if (f->ranks < 2) skip();
    for (int i = 0; i < 12; i += f->trained ? 3 : 1) {
        struct engine_group g = group_of(f, 2, KV_F16);
        struct engine_group_result result;
        g.options.fault = (struct fault){.kind = kinds[i / 4], .rank = i % 2, .step = i / 2 % 2 ? 1 : 20};
        assert_false(engine_group_run(&g, &f->requests[0], 1, &result));
        assert_true(g.err[0].exit_status == EXIT_LOCKSTEP || g.err[1].exit_status == EXIT_LOCKSTEP);
        assert_int_equal(g.stats.steps, g.options.fault.step - 1);
        engine_group_free(&result, 1);
    }
}

/* Without an argument, or "tiny": a tiny model made on the spot. With one: that trained model, or a made-up one whose MTP layer
 * agrees. */
int main(int argc, char **argv)
{
    if (argc > 2 && !group_backend_parse(argv[2], &backend_argument)) {
        fputs("usage: test_exactness [MODEL|tiny [cpu|cuda|cuda-plain]]\n", stderr);
        return 64;
    }
    if (!group_backend_there(backend_argument)) return 77;
    if (argc > 1 && strcmp(argv[1], "tiny") != 0) model_argument = argv[1];
    bool made_up = model_argument && !strncmp(model_argument, "synth:", 6);
    if (model_argument && !made_up && access(model_argument, R_OK) != 0) {
        print_message("SKIPPED: there is no %s\n", model_argument);
        return 77;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_alone_batched_reversed),     cmocka_unit_test(test_without_traces),
        cmocka_unit_test(test_drafts_alone),               cmocka_unit_test(test_preemption_and_prompt_cuts),
        cmocka_unit_test(test_threads),                    cmocka_unit_test(test_recordings),
        cmocka_unit_test(test_rank_counts_agree),          cmocka_unit_test(test_stop_strings),
        cmocka_unit_test(test_end_tokens),                 cmocka_unit_test(test_stopped_and_resumed),
        cmocka_unit_test(test_vanished_and_damaged),       cmocka_unit_test(test_unused_checkpoints),
        cmocka_unit_test(test_checkpoints_of_preempted),
        cmocka_unit_test(test_mtp_is_refused),             cmocka_unit_test(test_disagreement_is_found),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
