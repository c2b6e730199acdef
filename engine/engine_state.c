/* engine_state: everything a sequence remembers, as bytes: pages of positions 0 .. computed - 1, then its slot. They are the backend's own
 * bits: only an engine like this one may take them back. */
#include "engine_private.h"

size_t engine_state_bytes(const struct engine *e, int n_pages)
{
    return (size_t)n_pages * model_forward_page_bytes(e->forward) + model_forward_slot_bytes(e->forward);
}

void engine_state_save(struct engine *e, const struct sequence *s, char *out)
{
    size_t page_bytes = model_forward_page_bytes(e->forward);
    for (int i = 0; i < s->n_pages; i++, out += page_bytes) model_forward_save_page(e->forward, s->pages[i], out);
    model_forward_save_slot(e->forward, s->slot, out);
}

void engine_state_load(struct engine *e, const struct sequence *s, const char *bytes)
{
    size_t page_bytes = model_forward_page_bytes(e->forward);
    for (int i = 0; i < s->n_pages; i++, bytes += page_bytes) model_forward_load_page(e->forward, s->pages[i], bytes);
    model_forward_load_slot(e->forward, s->slot, bytes);
}
