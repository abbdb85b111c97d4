/* The units of a span list, as defined by units_reference.py.

   The device waits for the units before the first launch of a step. For some hundred units, Python takes longer
   than the device takes for a layer. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { KEYS = 128, STEPS = 4, NUMBERS = 8 };

/* The arrays of a span list, concatenated, and their lengths. */
typedef struct {
    const int32_t *arrays;
    int64_t tiles, requests, spans, rows, patched, num_heads;
} SpanArrays;

/* Pointers to the arrays; patch_bounds is NULL without patches. */
typedef struct {
    const int32_t *row_indptr, *request, *span_indptr, *offset, *length, *is_patch, *positions, *patch_bounds;
    int64_t num_tiles, num_heads;
} Lists;

typedef struct {
    double start, per_block, launch, per_state;
    int64_t programs, border; /* border is in steps */
} Costs;

/* The visible spans of a tile. span[n] is the n-th of them and blocks[n] its number of blocks, ends[n] the
   blocks up to its end. arrival[n] counts the steps from the tile's first block through the span's first block. */
typedef struct {
    int32_t *span, *blocks;
    int64_t *ends, *arrival;
    int64_t count;
} Tile;

typedef struct {
    int64_t first, stop, begin, last;
} Part;

typedef struct {
    int64_t blocks, number;
    int32_t numbers[NUMBERS];
} Unit;

static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static int64_t blocks_of(const Tile *tile) { return tile->count ? tile->ends[tile->count - 1] : 0; }

static int64_t steps_of(const Tile *tile, int64_t border)
{
    return STEPS * blocks_of(tile) + border * most(0, tile->count - 1);
}

/* Finds the visible spans of a tile. */
static void find_spans(const Lists *lists, int64_t number, int64_t border, Tile *tile)
{
    int32_t request = lists->request[number], row = lists->row_indptr[number + 1] - 1;
    int64_t total = 0;
    tile->count = 0;
    for (int32_t span = lists->span_indptr[request]; span < lists->span_indptr[request + 1]; span++) {
        int64_t slots = least((int64_t)lists->positions[row] - lists->offset[span] + 1, lists->length[span]);
        if (lists->patch_bounds && lists->is_patch[span])
            slots = lists->patch_bounds[row];
        if (slots <= 0)
            continue;
        int64_t n = tile->count++;
        tile->span[n] = span;
        tile->blocks[n] = (int32_t)((slots + KEYS - 1) / KEYS);
        tile->arrival[n] = STEPS * (total + 1) + border * n;
        tile->ends[n] = total += tile->blocks[n];
    }
}

/* The longest part of at most `length` steps that begins at block `at`, in the begin-th span. */
static Part part_from(const Tile *tile, int64_t at, int64_t begin, int64_t length, int64_t border)
{
    int64_t reach = STEPS * at + border * begin + length, last = begin;
    while (last + 1 < tile->count && tile->arrival[last + 1] <= reach)
        last++;
    return (Part){at, least(tile->ends[last], (reach - border * last) / STEPS), begin, last};
}

static Part whole_of(const Tile *tile) { return (Part){0, blocks_of(tile), 0, most(0, tile->count - 1)}; }

/* The part after another part. */
static Part next_part(const Tile *tile, Part part, int64_t length, int64_t border)
{
    return part_from(tile, part.stop, part.last + (part.stop == tile->ends[part.last]), length, border);
}

static int64_t num_parts(const Tile *tile, int64_t length, int64_t border)
{
    if (!tile->count)
        return 1;
    Part part = part_from(tile, 0, 0, length, border);
    int64_t count = 1, total = blocks_of(tile);
    for (; part.stop < total; count++)
        part = next_part(tile, part, length, border);
    return count;
}

static double time_of(const Costs *costs, int64_t steps, int64_t states, int64_t heads)
{
    double time = costs->start + costs->per_block * steps / STEPS;
    return states ? time + costs->launch + costs->per_state * states * heads : time;
}

/* The length of parts with the least time, 0 for whole tiles. */
static int64_t length_of_parts(const Lists *lists, const Costs *costs, const Tile *tiles)
{
    int64_t slots = most(1, costs->programs / lists->num_heads), sum = 0, longest = STEPS;
    if (lists->num_tiles >= slots)
        return 0;
    for (int64_t n = 0; n < lists->num_tiles; n++) {
        int64_t steps = steps_of(&tiles[n], costs->border);
        sum += steps;
        longest = most(longest, steps);
    }
    int64_t low = most(STEPS, sum / slots), length = longest;
    while (low < length) {
        int64_t middle = (low + length) / 2, count = 0;
        for (int64_t n = 0; n < lists->num_tiles; n++)
            count += (steps_of(&tiles[n], costs->border) + middle - 1) / middle;
        if (count <= slots)
            length = middle;
        else
            low = middle + 1;
    }
    /* a part may stay shorter than its length by less than a block and a border */
    for (;; length += STEPS / 2) {
        int64_t count = 0, states = 0;
        for (int64_t n = 0; n < lists->num_tiles; n++) {
            int64_t parts = num_parts(&tiles[n], length, costs->border);
            count += parts;
            states += parts * (lists->row_indptr[n + 1] - lists->row_indptr[n]);
        }
        if (count > slots)
            continue;
        if (count == lists->num_tiles)
            return 0;
        double cut = time_of(costs, length, states, lists->num_heads);
        return cut < time_of(costs, longest, 0, lists->num_heads) ? length : 0;
    }
}

/* Writes the units of a tile, in parts of `length` or whole if it is 0; returns their number. */
static int64_t list_tile(const Lists *lists, int64_t number, const Tile *tile, int64_t length, int64_t border,
                         int64_t state, int64_t num_units, Unit *units)
{
    int32_t first = lists->row_indptr[number], rows = lists->row_indptr[number + 1] - first;
    int64_t count = length ? num_parts(tile, length, border) : 1;
    Part part = length && tile->count ? part_from(tile, 0, 0, length, border) : whole_of(tile);
    for (int64_t n = 0; n < count; n++) {
        Unit *unit = &units[n];
        memset(unit, 0, sizeof *unit);
        unit->blocks = part.stop - part.first;
        unit->number = num_units + n;
        int32_t *numbers = unit->numbers;
        numbers[0] = first, numbers[1] = rows, numbers[6] = (int32_t)(state + n), numbers[7] = (int32_t)count;
        if (part.first < part.stop) {
            numbers[2] = tile->span[part.begin];
            numbers[3] = tile->span[part.last] + 1;
            numbers[4] = (int32_t)((part.first - tile->ends[part.begin] + tile->blocks[part.begin]) * KEYS);
            numbers[5] = (int32_t)((part.stop - tile->ends[part.last] + tile->blocks[part.last]) * KEYS);
        }
        if (n + 1 < count)
            part = next_part(tile, part, length, border);
    }
    return count;
}

/* Orders units by length, the longest first, then by number. */
static int by_length(const void *a, const void *b)
{
    const Unit *left = a, *right = b;
    if (left->blocks != right->blocks)
        return left->blocks < right->blocks ? 1 : -1;
    return left->number < right->number ? -1 : 1;
}

static Lists lists_of(const SpanArrays *input)
{
    Lists lists = {.row_indptr = input->arrays, .num_tiles = input->tiles, .num_heads = input->num_heads};
    lists.request = lists.row_indptr + input->tiles + 1;
    lists.span_indptr = lists.request + input->tiles;
    lists.offset = lists.span_indptr + input->requests + 1;
    lists.length = lists.offset + input->spans;
    lists.is_patch = lists.length + input->spans;
    lists.positions = lists.is_patch + input->spans;
    lists.patch_bounds = input->patched ? lists.positions + input->rows : NULL;
    return lists;
}

static int64_t num_spans(const Lists *lists, int64_t tile)
{
    int32_t request = lists->request[tile];
    return lists->span_indptr[request + 1] - lists->span_indptr[request];
}

/* Writes the units of all tiles and, in `states`, the first state of each row. */
static int64_t list_all(const Lists *lists, const Costs *costs, int64_t num_rows, Tile *tiles, Unit *units,
                        int32_t *states)
{
    int64_t border = costs ? costs->border : 0, length = 0, num_units = 0, state = 0;
    for (int64_t n = 0; n < lists->num_tiles; n++)
        find_spans(lists, n, border, &tiles[n]);
    if (costs && lists->num_tiles * lists->num_heads < costs->programs)
        length = length_of_parts(lists, costs, tiles);
    states[0] = 0;
    for (int64_t n = 0; n < lists->num_tiles; n++) {
        int64_t parts = list_tile(lists, n, &tiles[n], length, border, state, num_units, units + num_units);
        for (int32_t row = lists->row_indptr[n]; row < lists->row_indptr[n + 1]; row++)
            states[row + 1] = (int32_t)(state += parts);
        num_units += parts;
    }
    /* rows outside of all tiles have no states */
    for (int64_t row = lists->row_indptr[lists->num_tiles]; row < num_rows; row++)
        states[row + 1] = (int32_t)state;
    qsort(units, num_units, sizeof *units, by_length);
    return num_units;
}

/* Writes the numbers of at most `most_units` units to `output`. Behind the room for these, it writes the first
   state of each row and the end of the last row's states. `costs` is NULL for whole tiles. Returns the number
   of units, -1 if memory runs out. */
int64_t looseleaf_units(const SpanArrays *input, const Costs *costs, int64_t most_units, int32_t *output)
{
    Lists lists = lists_of(input);
    int64_t num_read_spans = 0, num_units = -1;
    for (int64_t n = 0; n < lists.num_tiles; n++)
        num_read_spans += num_spans(&lists, n);
    Tile *tiles = malloc((lists.num_tiles + 1) * sizeof *tiles);
    int64_t *longs = malloc((2 * num_read_spans + 1) * sizeof *longs);
    int32_t *ints = malloc((2 * num_read_spans + 1) * sizeof *ints);
    Unit *units = malloc((most_units + 1) * sizeof *units);
    if (tiles && longs && ints && units) {
        for (int64_t n = 0, at = 0; n < lists.num_tiles; at += num_spans(&lists, n), n++)
            tiles[n] = (Tile){ints + at, ints + num_read_spans + at, longs + at, longs + num_read_spans + at, 0};
        num_units = list_all(&lists, costs, input->rows, tiles, units, output + NUMBERS * most_units);
        for (int64_t n = 0; n < num_units; n++)
            memcpy(output + n * NUMBERS, units[n].numbers, sizeof units[n].numbers);
    }
    free(tiles), free(longs), free(ints), free(units);
    return num_units;
}
