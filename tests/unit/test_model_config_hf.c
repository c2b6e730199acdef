/* model_config over config.json: a good configuration of each class, then one member at a time: defaults, limits,
 * refusals. Members are changed in the parsed object, so that a case is one line. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "model_config.h"
#include "model_file_private.h"
#include "safetensors_build.h"

static const char qwen35[] =
    "{\"architectures\":[\"Qwen3_5ForCausalLM\"],\"model_type\":\"qwen3_5_text\",\"hidden_size\":48,"
    "\"intermediate_size\":96,\"vocab_size\":64,\"num_hidden_layers\":4,\"full_attention_interval\":4,\"layer_types\":"
    "[\"linear_attention\",\"linear_attention\",\"linear_attention\",\"full_attention\"],\"num_attention_heads\":6,"
    "\"num_key_value_heads\":2,\"head_dim\":64,\"linear_num_key_heads\":2,\"linear_num_value_heads\":6,"
    "\"linear_key_head_dim\":32,\"linear_value_head_dim\":16,\"linear_conv_kernel_dim\":4,\"hidden_act\":\"silu\","
    "\"rms_norm_eps\":1e-06,\"attn_output_gate\":true,\"output_gate_type\":\"swish\",\"mamba_ssm_dtype\":\"float32\","
    "\"attention_bias\":false,\"attention_dropout\":0.0,\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":"
    "10000000.0,\"partial_rotary_factor\":0.25,\"mrope_interleaved\":true,\"mrope_section\":[3,3,2]},"
    "\"max_position_embeddings\":2048,\"tie_word_embeddings\":true,\"mtp_num_hidden_layers\":1,"
    "\"mtp_use_dedicated_embeddings\":false,\"dtype\":\"bfloat16\",\"pad_token_id\":null}";
static const char llama[] =
    "{\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\",\"hidden_size\":48,\"intermediate_size\":96,"
    "\"vocab_size\":64,\"num_hidden_layers\":2,\"num_attention_heads\":3,\"num_key_value_heads\":1,\"hidden_act\":"
    "\"silu\",\"rms_norm_eps\":1e-05,\"rope_theta\":100000,\"rope_scaling\":null,\"max_position_embeddings\":8192,"
    "\"tie_word_embeddings\":false,\"attention_bias\":false,\"mlp_bias\":false,\"pretraining_tp\":1}";
static const char qwen2[] =
    "{\"architectures\":[\"Qwen2ForCausalLM\"],\"model_type\":\"qwen2\",\"hidden_size\":48,\"intermediate_size\":96,"
    "\"vocab_size\":64,\"num_hidden_layers\":2,\"num_attention_heads\":3,\"num_key_value_heads\":1,\"hidden_act\":"
    "\"silu\",\"rms_norm_eps\":1e-06,\"rope_theta\":1000000.0,\"max_position_embeddings\":32768,\"sliding_window\":"
    "32768,\"max_window_layers\":2,\"use_sliding_window\":false,\"tie_word_embeddings\":true}";
static const char qwen3[] =
    "{\"architectures\":[\"Qwen3ForCausalLM\"],\"model_type\":\"qwen3\",\"hidden_size\":48,\"intermediate_size\":96,"
    "\"vocab_size\":64,\"num_hidden_layers\":2,\"num_attention_heads\":3,\"num_key_value_heads\":3,\"head_dim\":32,"
    "\"hidden_act\":\"silu\",\"rms_norm_eps\":1e-06,\"rope_theta\":1000000,\"rope_scaling\":null,\"sliding_window\":"
    "null,\"use_sliding_window\":false,\"attention_bias\":false,\"max_position_embeddings\":40960,\"layer_types\":"
    "[\"full_attention\",\"full_attention\"],\"tie_word_embeddings\":true}";

/* The configuration of this text over an embedding of 64 rows of 48 and, if named, one vector. */
static enum rc read_text(const char *config, const char *embedding, const char *tensor, struct model_config *out,
                         struct err *e)
{
    struct safetensors_build s = {0};
    struct buf weights = {0};
    struct model_file *m;
    if (embedding) add_2d(&s, embedding, "BF16", 64, 48);
    if (tensor) add_1d(&s, tensor, "BF16", 16);
    build_safetensors(&s, &weights);
    const struct model_blob blobs[] = {{"config.json", config, strlen(config)},
                                       {"model.safetensors", weights.data, weights.len}};
    assert_int_equal(model_file_open_blobs(blobs, 2, "m", &m, NULL), RC_OK);
    enum rc rc = model_config_read(m, out, e);
    model_file_close(m);
    buf_free(&weights);
    return rc;
}

static enum rc read_good(const char *config, const char *tensor, struct model_config *c)
{
    return read_text(config, "model.embed_tokens.weight", tensor, c, NULL);
}

static void reads_a_hybrid(void **state)
{
    (void)state;
    struct model_config c = {0};
    assert_int_equal(read_good(qwen35, "mtp.fc.weight", &c), RC_OK);
    assert_int_equal(c.arch, MODEL_ARCH_QWEN35);
    assert_int_equal(c.layout, MODEL_LAYOUT_HF);
    assert_int_equal(c.n_layers, 4);
    assert_int_equal(c.hidden, 48);
    assert_int_equal(c.ffn, 96);
    assert_int_equal(c.n_heads, 6);
    assert_int_equal(c.n_kv_heads, 2);
    assert_int_equal(c.head_dim, 64);
    assert_int_equal(c.rope_dim, 16);
    assert_false(c.rope_adjacent);
    assert_true(c.rope_theta == 1e7);
    assert_true(c.rms_eps == 1e-6f);
    assert_int_equal(c.vocab, 64);
    assert_int_equal(c.context, 2048);
    assert_true(c.tied && c.qk_norm && c.attn_gate && c.mtp);
    assert_false(c.qkv_bias);
    for (int i = 0; i < 4; i++) assert_int_equal(c.gdn[i], i != 3);
    assert_int_equal(c.gdn_k_heads, 2);
    assert_int_equal(c.gdn_v_heads, 6);
    assert_int_equal(c.gdn_k_dim, 32);
    assert_int_equal(c.gdn_v_dim, 16);
    assert_int_equal(c.conv_width, 4);
    assert_int_equal(read_good(qwen35, NULL, &c), RC_OK);
    assert_false(c.mtp); /* announced, but its tensors were left out */
}

/* The text's numbers inside a multimodal configuration; what the whole says of tying counts where the text is silent. */
static void reads_a_multimodal_one(void **state)
{
    (void)state;
    struct model_config c = {0};
    struct buf text = {0};
    for (int silent = 0; silent < 2; silent++) {
        json_t *inner = json_loads(qwen35, 0, NULL);
        json_object_del(inner, "architectures");
        if (silent) json_object_del(inner, "tie_word_embeddings");
        char *dump = json_dumps(inner, 0);
        buf_clear(&text);
        buf_printf(
            &text,
            "{\"architectures\":[\"Qwen3_5ForConditionalGeneration\"],\"model_type\":\"qwen3_5\",\"text_config\":"
            "%s,\"vision_config\":{\"depth\":27,\"hidden_act\":\"gelu\"},\"tie_word_embeddings\":false}",
            dump);
        assert_int_equal(
            read_text(text.data, "model.language_model.embed_tokens.weight", "model.mtp.fc.weight", &c, NULL), RC_OK);
        assert_int_equal(c.arch, MODEL_ARCH_QWEN35);
        assert_int_equal(c.gdn_v_heads, 6);
        assert_int_equal(c.tied, !silent);
        assert_true(c.mtp);
        free(dump);
        json_decref(inner);
    }
    buf_free(&text);
}

static void reads_the_others(void **state)
{
    (void)state;
    static const struct {
        const char *config;
        enum model_arch arch;
        int kv_heads, head_dim;
        double theta;
        bool bias, norm, tied;
    } cases[] = {
        {llama, MODEL_ARCH_LLAMA, 1, 16, 1e5, false, false, false},
        {qwen2, MODEL_ARCH_QWEN2, 1, 16, 1e6, true, false, true},
        {qwen3, MODEL_ARCH_QWEN3, 3, 32, 1e6, false, true, true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct model_config c = {0};
        assert_int_equal(read_good(cases[i].config, NULL, &c), RC_OK);
        assert_int_equal(c.arch, cases[i].arch);
        assert_int_equal(c.n_layers, 2);
        assert_int_equal(c.n_kv_heads, cases[i].kv_heads);
        assert_int_equal(c.head_dim, cases[i].head_dim);
        assert_int_equal(c.rope_dim, cases[i].head_dim);
        assert_true(c.rope_theta == cases[i].theta);
        assert_int_equal(c.qkv_bias, cases[i].bias);
        assert_int_equal(c.qk_norm, cases[i].norm);
        assert_int_equal(c.tied, cases[i].tied);
        assert_false(c.rope_adjacent || c.attn_gate || c.mtp || c.gdn[0] || c.gdn_v_heads);
    }
}

/* One member set to a JSON value, or taken out; a part of the error, NULL: accepted. */
struct change {
    const char *base;
    const char *member;
    const char *value; /* NULL: taken out */
    const char *expected;
};

static const struct change changes[] = {
    {qwen35, "model_type", NULL, "model_type is missing or no text"},
    {qwen35, "model_type", "\"qwen3_5_moe_text\"", "the model type \"qwen3_5_moe_text\" is not supported"},
    {qwen35, "model_type", "\"qwen3_5\"", NULL},
    {qwen35, "model_type", "\"x\\u001by\"", "the model type \"x?y\" is not supported"},
    {qwen35, "model_type", "\"qwen2\"", "the architecture \"Qwen3_5ForCausalLM\" is not supported for this model type"},
    {qwen35, "architectures", NULL, NULL},
    {qwen35, "architectures", "[\"Qwen3_5MoeForCausalLM\"]", "the architecture \"Qwen3_5MoeForCausalLM\""},
    {qwen35, "architectures", "[1]", "a name in architectures is no text"},
    {qwen35, "architectures", "\"Qwen3_5ForCausalLM\"", "architectures is no array"},
    {qwen35, "text_config", "3", "text_config is no object"},
    {qwen35, "text_config", "{\"model_type\":\"llama\"}", "text_config is of another model type than the whole"},
    {llama, "text_config", "{\"model_type\":\"llama\"}", "text_config is of another model type than the whole"},
    {qwen35, "num_hidden_layers", NULL, "num_hidden_layers is missing"},
    {qwen35, "num_hidden_layers", "null", "num_hidden_layers is missing"},
    {qwen35, "num_hidden_layers", "4.0", "num_hidden_layers is no whole number"},
    {qwen35, "num_hidden_layers", "-4", "num_hidden_layers is no whole number"},
    {qwen35, "num_hidden_layers", "0", "num_hidden_layers is 0"},
    {qwen35, "num_hidden_layers", "513", "num_hidden_layers is 513"},
    {qwen35, "num_hidden_layers", "5", "layer_types names 4 layers, num_hidden_layers is 5"},
    {qwen35, "hidden_size", NULL, "hidden_size is missing"},
    {qwen35, "hidden_size", "40", "hidden_size is 40"},
    {qwen35, "hidden_size", "64", "model.embed_tokens.weight is no matrix with rows of 64"},
    {qwen35, "intermediate_size", "24", "intermediate_size is 24"},
    {qwen35, "vocab_size", "65", "vocab_size is 65, but model.embed_tokens.weight has 64 rows"},
    {qwen35, "vocab_size", NULL, NULL},
    {qwen35, "max_position_embeddings", NULL, "max_position_embeddings is missing"},
    {qwen35, "max_position_embeddings", "4194305", "max_position_embeddings is 4194305"},
    {qwen35, "rms_norm_eps", NULL, "rms_norm_eps is missing"},
    {qwen35, "rms_norm_eps", "1", "the epsilon of norms is 1"},
    {qwen35, "rms_norm_eps", "0", "rms_norm_eps is 0"},
    {qwen35, "rms_norm_eps", "\"1e-6\"", "rms_norm_eps is no number"},
    {qwen35, "layer_types", NULL, NULL},
    {qwen35, "full_attention_interval", NULL, NULL},
    {qwen35, "layer_types", "[\"linear_attention\"]", "layer_types names 1 layers"},
    {qwen35, "layer_types", "[1,1,1,1]", "a name in layer_types is no text"},
    {qwen35, "layer_types", "{}", "layer_types is no array"},
    {qwen35, "layer_types", "[\"full_attention\",\"sliding_attention\",\"full_attention\",\"full_attention\"]",
     "layer 1 is of type \"sliding_attention\""},
    {qwen3, "layer_types", "[\"full_attention\",\"linear_attention\"]", "layer 1 is of type \"linear_attention\""},
    {qwen35, "num_attention_heads", "5", "5 query heads cannot share 2 key-value heads"},
    {qwen35, "num_key_value_heads", NULL, "num_key_value_heads is missing"},
    {qwen35, "num_key_value_heads", "7", "num_key_value_heads is 7"},
    {llama, "num_key_value_heads", NULL, NULL},
    {qwen35, "head_dim", NULL, "head_dim is missing"},
    {qwen35, "head_dim", "272", "head_dim is 272"},
    {llama, "num_attention_heads", "5", "head_dim is missing"},
    {qwen35, "linear_num_key_heads", NULL, "linear_num_key_heads is missing"},
    {qwen35, "linear_num_key_heads", "4", "6 value heads cannot share 4 key heads"},
    {qwen35, "linear_num_value_heads", "0", "linear_num_value_heads is 0"},
    {qwen35, "linear_key_head_dim", "24", "linear_key_head_dim is 24"},
    {qwen35, "linear_value_head_dim", "512", "linear_value_head_dim is 512"},
    {qwen35, "linear_conv_kernel_dim", "9", "linear_conv_kernel_dim is 9"},
    {qwen35, "hidden_act", "\"gelu\"", "hidden_act is \"gelu\", which is not supported"},
    {qwen35, "hidden_act", "7", "hidden_act is no text"},
    {qwen35, "attn_output_gate", NULL, NULL},
    {qwen35, "attn_output_gate", "false", "attn_output_gate is false"},
    {qwen35, "attn_output_gate", "1", "attn_output_gate is no truth value"},
    {qwen35, "output_gate_type", NULL, NULL},
    {qwen35, "output_gate_type", "\"silu\"", NULL},
    {qwen35, "output_gate_type", "\"sigmoid\"", "output_gate_type is \"sigmoid\""},
    {qwen35, "mamba_ssm_dtype", "\"bfloat16\"", "mamba_ssm_dtype is \"bfloat16\""},
    {qwen35, "attention_bias", "true", "attention_bias is true"},
    {llama, "attention_bias", "true", "attention_bias is true"},
    {llama, "mlp_bias", "true", "mlp_bias is true"},
    {llama, "sliding_window", "4096", "sliding_window is set"},
    {qwen2, "use_sliding_window", "true", "use_sliding_window is true"},
    {qwen2, "attention_bias", "true", NULL}, /* as it is */
    {qwen35, "mtp_num_hidden_layers", "2", "mtp_num_hidden_layers is 2"},
    {qwen35, "mtp_num_hidden_layers", NULL, NULL},
    {qwen35, "mtp_use_dedicated_embeddings", "true", "mtp_use_dedicated_embeddings is true"},
    {llama, "num_local_experts", "8", "num_local_experts is set"},
    {qwen3, "num_experts", "0", NULL},
    {qwen35, "tie_word_embeddings", "0", "tie_word_embeddings is no truth value"},
    {qwen35, "rope_parameters", NULL, "rope_theta is missing"},
    {qwen35, "rope_parameters", "3", "rope_parameters is no object"},
    {qwen35, "rope_parameters", "{\"rope_theta\":1e7,\"partial_rotary_factor\":0.25}", NULL},
    {qwen35, "rope_parameters", "{\"rope_theta\":1e7}", "partial_rotary_factor is missing"},
    {qwen35, "rope_parameters", "{\"rope_theta\":1e7,\"partial_rotary_factor\":0.3}",
     "partial_rotary_factor 0.3 of 64"},
    {qwen35, "rope_parameters", "{\"rope_theta\":1e7,\"partial_rotary_factor\":1.25}", "partial_rotary_factor 1.25 of"},
    {qwen35, "rope_parameters", "{\"rope_theta\":1e7,\"partial_rotary_factor\":0.015625}", "rotated dimensions is 1"},
    {qwen35, "rope_parameters", "{\"rope_theta\":-1,\"partial_rotary_factor\":0.25}", "rope_theta is -1"},
    {qwen35, "rope_parameters", "{\"full_attention\":{\"rope_theta\":1e7}}",
     "rope_parameters differs by kind of layer"},
    {qwen2, "rope_scaling", "{\"type\":\"yarn\",\"factor\":4.0}",
     "rope_scaling: rotary embeddings of type \"yarn\" are not supported"},
    {llama, "rope_scaling", "{\"rope_type\":\"llama3\",\"factor\":8.0}",
     "rope_scaling: rotary embeddings of type \"llama3\" are not supported"},
    {llama, "rope_scaling", "{\"rope_type\":\"linear\",\"factor\":1.0}", NULL},
    {llama, "rope_scaling", "{\"rope_type\":\"linear\",\"factor\":2}", "rope_scaling: linear scaling by 2"},
    {llama, "rope_scaling", "{\"rope_type\":\"linear\"}", "factor is missing"},
    {llama, "rope_scaling", "{\"rope_type\":7}", "rope_type is no text"},
    {llama, "rope_parameters", "{\"rope_type\":\"dynamic\"}", "type \"dynamic\""},
    {llama, "rope_theta", NULL, NULL},
    {llama, "max_position_embeddings", "2048", NULL},
};

static void checks_each_member(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
        const struct change *change = &changes[i];
        struct model_config c = {.hidden = -5};
        struct err e = {0};
        json_t *config = json_loads(change->base, 0, NULL);
        if (change->value)
            json_object_set_new(config, change->member, json_loads(change->value, JSON_DECODE_ANY, NULL));
        else
            json_object_del(config, change->member);
        char *text = json_dumps(config, 0);
        enum rc rc = read_text(text, "model.embed_tokens.weight", NULL, &c, &e);
        free(text);
        json_decref(config);
        if (!change->expected) {
            if (rc != RC_OK) fail_msg("change %zu (%s) was refused: %s", i, change->member, e.text);
            continue;
        }
        if (rc != RC_BAD_INPUT || !strstr(e.text, change->expected))
            fail_msg("change %zu (%s): rc %d, \"%s\", not \"%s\"", i, change->member, rc, e.text, change->expected);
        assert_int_equal(e.exit_status, EXIT_UNAVAILABLE);
        assert_string_equal(e.source, "m/config.json");
        assert_int_equal(c.hidden, -5); /* untouched */
    }
}

/* Beside the members: the text itself, and what the tensors say. */
static void checks_the_rest(void **state)
{
    (void)state;
    static const struct {
        const char *config, *embedding, *code, *text;
        int64_t line;
    } cases[] = {
        {"", "model.embed_tokens.weight", "json_invalid", "invalid JSON: the text ends inside a value", 1},
        {"{\n\"a\":1,\n\"a\":2}", "model.embed_tokens.weight", "json_duplicate", "invalid JSON: a key is given twice",
         3},
        {"[]", "model.embed_tokens.weight", "json_invalid", "invalid JSON: an array, not an object", 0},
        {qwen35, "embed.weight", "model_missing_tensor", "the tensor model.embed_tokens.weight is missing", 0},
        {qwen35, NULL, "model_missing_tensor", "the tensor model.embed_tokens.weight is missing", 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct model_config c;
        struct err e = {0};
        assert_int_equal(read_text(cases[i].config, cases[i].embedding, NULL, &c, &e), RC_BAD_INPUT);
        assert_string_equal(e.code, cases[i].code);
        assert_string_equal(e.text, cases[i].text);
        assert_string_equal(e.source, "m/config.json");
        assert_int_equal(e.line, cases[i].line);
    }
    struct model_config c;
    struct err e = {0};
    struct buf deep = {0};
    buf_append_str(&deep, "{\"a\":");
    for (int i = 0; i < 40; i++) buf_append_str(&deep, "[");
    assert_int_equal(read_text(deep.data, "model.embed_tokens.weight", NULL, &c, &e), RC_BAD_INPUT);
    assert_string_equal(e.text, "the JSON nests deeper than 32");
    buf_free(&deep);
    /* weights with nothing beside them have no configuration */
    struct model_file *m;
    e = (struct err){0};
    assert_int_equal(model_file_open_bytes("\2\0\0\0\0\0\0\0{}", 10, "w", &m, NULL), RC_OK);
    assert_int_equal(model_config_read(m, &c, &e), RC_BAD_INPUT);
    assert_string_equal(e.text, "there is no config.json");
    model_file_close(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reads_a_hybrid),   cmocka_unit_test(reads_a_multimodal_one),
        cmocka_unit_test(reads_the_others), cmocka_unit_test(checks_each_member),
        cmocka_unit_test(checks_the_rest),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
