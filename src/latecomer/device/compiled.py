"""Local SGD compiled with numba: `training.resumed_update` for sequential networks.

Activations are stored as (features, batch), images as (channel, height, width, batch): every inner
loop runs over contiguous memory, a convolution is a sum of shifted rows without im2col, and
flattening is free. All of it is in one file, because numba's disk cache only detects changes in the
file of the function that is called first.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from latecomer.device.program import (
    AVGPOOL,
    BIAS,
    CONV,
    FIRST,
    IN_C,
    IN_H,
    IN_W,
    K_H,
    K_W,
    KIND,
    LINEAR,
    MAXPOOL,
    OUT_C,
    OUT_H,
    OUT_W,
    PAD_H,
    PAD_W,
    RELU,
    WEIGHT,
)

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

# Sums may be reordered, but NaN and infinity are kept: the server must detect diverged training.
fast = njit(
    cache=True,
    fastmath={"reassoc", "contract", "arcp", "nsz"},
    error_model="numpy",
    nogil=True,
    boundscheck=False,
)


@fast
def train(
    table: Ints,
    inputs: Ints,
    whole: Floats,
    anchor: Floats,
    velocity: Floats,
    x: Floats,
    y: Ints,
    order: Ints,
    mask: Floats,
    lr: float,
    momentum: float,
    weight_decay: float,
    prox: float,
    clip: float,
) -> None:
    """Train `whole` and its momentum `velocity` in place on the mini-batches `order`.

    `mask` is 1 at the real places of a batch, `anchor` the parameters that `prox` pulls to.
    """
    gradient = np.empty_like(whole)
    width = order.shape[1]
    layers = len(table)
    starts, total = _places(table, width)
    values = np.empty(total, np.float32)
    errors = np.empty(total, np.float32)
    winners = np.empty(total, np.int32)
    padded_starts, padded_total = _padded_places(table, width)
    padded = np.zeros(padded_total, np.float32)
    padded_errors = np.empty(padded_total, np.float32)
    for step in range(len(order)):
        n = 0
        while n < width and mask[step, n] > 0:
            n += 1
        if n == 0:
            continue
        if table[0, KIND] == FIRST:
            _gather_rows(values, x, order[step], n)
        else:
            _gather(values, inputs, x, order[step], n)
        for i in range(layers):
            _forward(table[i], whole, values, starts[i], starts[i + 1], winners, padded,
                     padded_starts[i], n)  # fmt: skip
        _loss_error(values, errors, starts[layers], table[layers - 1, OUT_C], y, order[step], n)
        if clip == 0.0:
            for i in range(layers - 1, -1, -1):
                _weight_gradient(table[i], gradient, values, errors, starts[i], starts[i + 1],
                                 padded, padded_starts[i], n)  # fmt: skip
                if i > 0:
                    _backward(table[i], whole, values, errors, starts[i], starts[i + 1], winners,
                              padded_errors, padded_starts[i], n)  # fmt: skip
        else:
            for i in range(layers - 1, 0, -1):
                _backward(table[i], whole, values, errors, starts[i], starts[i + 1], winners,
                          padded_errors, padded_starts[i], n)  # fmt: skip
            _scale_to_clip(table, values, errors, starts, clip, n)
            for i in range(layers):
                _weight_gradient(table[i], gradient, values, errors, starts[i], starts[i + 1],
                                 padded, padded_starts[i], n)  # fmt: skip
        decay = np.float32(weight_decay + prox)
        pull, keep, rate = np.float32(prox), np.float32(momentum), np.float32(lr)
        if decay == 0:
            for j in range(len(whole)):
                velocity[j] = keep * velocity[j] + gradient[j]
                whole[j] -= rate * velocity[j]
        else:
            for j in range(len(whole)):
                slope = gradient[j] + decay * whole[j] - pull * anchor[j]
                velocity[j] = keep * velocity[j] + slope
                whole[j] -= rate * velocity[j]


@fast
def _places(table: Ints, width: int) -> tuple[Ints, int]:
    """Offsets in the workspace of each layer's input and of the last output, and its size."""
    starts = np.zeros(len(table) + 1, np.int64)
    place = table[0, IN_C] * table[0, IN_H] * table[0, IN_W] * width
    for i in range(len(table)):
        starts[i + 1] = place
        place += table[i, OUT_C] * table[i, OUT_H] * table[i, OUT_W] * width
    return starts, place


@fast
def _padded_places(table: Ints, width: int) -> tuple[Ints, int]:
    starts = np.zeros(len(table), np.int64)
    place = 0
    for i in range(len(table)):
        starts[i] = place
        if table[i, KIND] == CONV:
            height = table[i, IN_H] + 2 * table[i, PAD_H]
            place += table[i, IN_C] * height * (table[i, IN_W] + 2 * table[i, PAD_W]) * width
    return starts, place


@fast
def _gather(values: Floats, inputs: Ints, x: Floats, rows: Ints, n: int) -> None:
    """The mini-batch as (features, batch)."""
    for f in range(len(inputs)):
        feature = inputs[f]
        for b in range(n):
            values[f * n + b] = x[rows[b], feature]


@fast
def _gather_rows(values: Floats, x: Floats, rows: Ints, n: int) -> None:
    """The mini-batch as (batch, features)."""
    features = x.shape[1]
    for b in range(n):
        values[b * features : (b + 1) * features] = x[rows[b]]


@fast
def _forward(
    row: Ints,
    whole: Floats,
    values: Floats,
    source: int,
    target: int,
    winners: NDArray[np.int32],
    padded: Floats,
    pad_start: int,
    n: int,
) -> None:
    kind = row[KIND]
    fan_in, fan_out = row[IN_C] * row[IN_H] * row[IN_W], row[OUT_C] * row[OUT_H] * row[OUT_W]
    before, after = values[source : source + fan_in * n], values[target : target + fan_out * n]
    if kind in (LINEAR, FIRST):
        weight = whole[row[WEIGHT] : row[WEIGHT] + fan_in * fan_out].reshape(fan_out, fan_in)
        out = after.reshape(fan_out, n)
        if kind == LINEAR:
            np.dot(weight, before.reshape(fan_in, n), out)
        else:
            np.dot(weight, before.reshape(n, fan_in).T, out)
        for o in range(fan_out):
            bias = whole[row[BIAS] + o]
            for b in range(n):
                out[o, b] += bias
    elif kind == RELU:
        for j in range(fan_out * n):
            after[j] = max(before[j], np.float32(0))
    elif kind == MAXPOOL:
        _maxpool(row, before, after, winners[target : target + fan_out * n], n)
    elif kind == AVGPOOL:
        _avgpool(row, before, after, n)
    elif kind == CONV:
        height, width = row[IN_H] + 2 * row[PAD_H], (row[IN_W] + 2 * row[PAD_W]) * n
        room = padded[pad_start : pad_start + row[IN_C] * height * width]
        _pad(row, before, room, n)
        _convolve(row, whole, room.reshape(row[IN_C], height, width),
                  after.reshape(row[OUT_C], row[OUT_H], row[OUT_W] * n), n)  # fmt: skip


@fast
def _backward(
    row: Ints,
    whole: Floats,
    values: Floats,
    errors: Floats,
    source: int,
    target: int,
    winners: NDArray[np.int32],
    padded_errors: Floats,
    pad_start: int,
    n: int,
) -> None:
    """The error of a layer's input from that of its output."""
    kind = row[KIND]
    fan_in, fan_out = row[IN_C] * row[IN_H] * row[IN_W], row[OUT_C] * row[OUT_H] * row[OUT_W]
    before, after = errors[source : source + fan_in * n], errors[target : target + fan_out * n]
    if kind == LINEAR:
        weight = whole[row[WEIGHT] : row[WEIGHT] + fan_in * fan_out].reshape(fan_out, fan_in)
        np.dot(weight.T, after.reshape(fan_out, n), before.reshape(fan_in, n))
    elif kind == RELU:
        seen = values[target : target + fan_out * n]
        for j in range(fan_out * n):
            before[j] = after[j] if seen[j] > 0 else np.float32(0)
    elif kind == MAXPOOL:
        _maxpool_back(row, before, after, winners[target : target + fan_out * n], n)
    elif kind == AVGPOOL:
        _avgpool_back(row, before, after, n)
    elif kind == CONV:
        height, width = row[IN_H] + 2 * row[PAD_H], (row[IN_W] + 2 * row[PAD_W]) * n
        room = padded_errors[pad_start : pad_start + row[IN_C] * height * width]
        _convolve_back(row, whole, room.reshape(row[IN_C], height, width),
                       after.reshape(row[OUT_C], row[OUT_H], row[OUT_W] * n), n)  # fmt: skip
        _unpad(row, before, room, n)


@fast
def _weight_gradient(
    row: Ints,
    gradient: Floats,
    values: Floats,
    errors: Floats,
    source: int,
    target: int,
    padded: Floats,
    pad_start: int,
    n: int,
) -> None:
    kind = row[KIND]
    if row[WEIGHT] < 0:
        return
    fan_in, fan_out = row[IN_C] * row[IN_H] * row[IN_W], row[OUT_C] * row[OUT_H] * row[OUT_W]
    after = errors[target : target + fan_out * n]
    if kind != CONV:
        out = gradient[row[WEIGHT] : row[WEIGHT] + fan_in * fan_out].reshape(fan_out, fan_in)
        seen = values[source : source + fan_in * n]
        if kind == LINEAR:
            np.dot(after.reshape(fan_out, n), seen.reshape(fan_in, n).T, out)
        else:
            np.dot(after.reshape(fan_out, n), seen.reshape(n, fan_in), out)
    else:
        height, width = row[IN_H] + 2 * row[PAD_H], (row[IN_W] + 2 * row[PAD_W]) * n
        room = padded[pad_start : pad_start + row[IN_C] * height * width]
        _convolve_weights(row, gradient, room.reshape(row[IN_C], height, width),
                          after.reshape(row[OUT_C], row[OUT_H], row[OUT_W] * n), n)  # fmt: skip
    per_channel = row[OUT_H] * row[OUT_W] * n
    for o in range(row[OUT_C]):
        total = np.float32(0)
        for j in range(o * per_channel, (o + 1) * per_channel):
            total += after[j]
        gradient[row[BIAS] + o] = total


@fast
def _loss_error(
    values: Floats, errors: Floats, start: int, classes: int, y: Ints, rows: Ints, n: int
) -> None:
    """The error of mean cross-entropy at the output: (softmax - truth) / n."""
    logits = values[start : start + classes * n].reshape(classes, n)
    error = errors[start : start + classes * n].reshape(classes, n)
    share = np.float32(1.0 / n)
    for b in range(n):
        top = logits[0, b]
        for c in range(1, classes):
            top = max(top, logits[c, b])
        total = np.float32(0)
        for c in range(classes):
            error[c, b] = np.exp(logits[c, b] - top)
            total += error[c, b]
        for c in range(classes):
            error[c, b] *= share / total
        error[y[rows[b]], b] -= share


@fast
def _scale_to_clip(
    table: Ints, values: Floats, errors: Floats, starts: Ints, clip: float, n: int
) -> None:
    """Scale each example's errors so that its own gradient has an L2 norm of at most `clip`.

    Only for linear layers: an example's gradient there is an outer product, whose norm is the
    product of two norms, so no gradient of a single example is ever written down.
    """
    squares = np.zeros(n, np.float32)
    for i in range(len(table)):
        kind = table[i, KIND]
        if kind in (LINEAR, FIRST):
            fan_in, fan_out = table[i, IN_C], table[i, OUT_C]
            between, apart = (n, 1) if kind == LINEAR else (1, fan_in)
            for b in range(n):
                seen = np.float32(1)
                for f in range(fan_in):
                    seen += values[starts[i] + f * between + b * apart] ** 2
                error = np.float32(0)
                for o in range(fan_out):
                    error += errors[starts[i + 1] + o * n + b] ** 2
                squares[b] += seen * error
    factors = np.empty(n, np.float32)
    for b in range(n):
        # Errors carry 1/n already: the example's own norm is n times as large.
        norm = np.sqrt(squares[b]) * n
        factors[b] = clip / norm if norm > clip else np.float32(1)
    for i in range(len(table)):
        if table[i, KIND] != RELU:
            for o in range(table[i, OUT_C]):
                for b in range(n):
                    errors[starts[i + 1] + o * n + b] *= factors[b]


@fast
def _pad(row: Ints, before: Floats, room: Floats, n: int) -> None:
    """The input with its zero border."""
    height, width = row[IN_H], row[IN_W] * n
    p_h, p_w = row[PAD_H], row[PAD_W] * n
    full = width + 2 * p_w
    room[:] = 0
    for c in range(row[IN_C]):
        for h in range(height):
            a = (c * height + h) * width
            z = (c * (height + 2 * p_h) + h + p_h) * full + p_w
            room[z : z + width] = before[a : a + width]


@fast
def _unpad(row: Ints, before: Floats, room: Floats, n: int) -> None:
    height, width = row[IN_H], row[IN_W] * n
    p_h, p_w = row[PAD_H], row[PAD_W] * n
    full = width + 2 * p_w
    for c in range(row[IN_C]):
        for h in range(height):
            a = (c * height + h) * width
            z = (c * (height + 2 * p_h) + h + p_h) * full + p_w
            before[a : a + width] = room[z : z + width]


@fast
def _convolve(row: Ints, whole: Floats, x: Floats, out: Floats, n: int) -> None:
    """out[o, h] = bias + sum over channel and window of weight * shifted rows of x.

    Windows five wide are taken four output channels at a time: each row of x is loaded once.
    """
    channels, k_h, k_w, run = row[IN_C], row[K_H], row[K_W], out.shape[2]
    size = channels * k_h * k_w
    outputs = row[OUT_C]
    for o in range(outputs):
        out[o] = whole[row[BIAS] + o]
    blocked = outputs // 4 * 4 if k_w == 5 else 0
    for o in range(0, blocked, 4):
        for c in range(channels):
            for i in range(k_h):
                w = row[WEIGHT] + o * size + (c * k_h + i) * k_w
                _add5x4(out[o : o + 4], x[c, i:], whole[w:], size, n, run)
    for o in range(blocked, outputs):
        for h in range(row[OUT_H]):
            target = out[o, h]
            for c in range(channels):
                for i in range(k_h):
                    source = x[c, h + i]
                    w = row[WEIGHT] + o * size + (c * k_h + i) * k_w
                    if k_w == 5:
                        _add5(target, source, whole[w:], n, run)
                    elif k_w == 3:
                        _add3(target, source, whole[w:], n, run)
                    else:
                        for k in range(k_w):
                            factor = whole[w + k]
                            shift = k * n
                            for j in range(run):
                                target[j] += factor * source[j + shift]


@fast
def _add5x4(out: Floats, rows: Floats, w: Floats, size: int, n: int, run: int) -> None:
    a0, b0, c0, d0, e0 = w[0], w[1], w[2], w[3], w[4]
    v = w[size:]
    a1, b1, c1, d1, e1 = v[0], v[1], v[2], v[3], v[4]
    v = w[2 * size :]
    a2, b2, c2, d2, e2 = v[0], v[1], v[2], v[3], v[4]
    v = w[3 * size :]
    a3, b3, c3, d3, e3 = v[0], v[1], v[2], v[3], v[4]
    for h in range(out.shape[1]):
        source = rows[h]
        x1, x2, x3, x4 = source[n:], source[2 * n :], source[3 * n :], source[4 * n :]
        t0, t1, t2, t3 = out[0, h], out[1, h], out[2, h], out[3, h]
        for j in range(run):
            p, q, r, s, u = source[j], x1[j], x2[j], x3[j], x4[j]
            t0[j] += a0 * p + b0 * q + c0 * r + d0 * s + e0 * u
            t1[j] += a1 * p + b1 * q + c1 * r + d1 * s + e1 * u
            t2[j] += a2 * p + b2 * q + c2 * r + d2 * s + e2 * u
            t3[j] += a3 * p + b3 * q + c3 * r + d3 * s + e3 * u


@fast
def _add5(target: Floats, source: Floats, w: Floats, n: int, run: int) -> None:
    a, b, c, d, e = w[0], w[1], w[2], w[3], w[4]
    x1, x2, x3, x4 = source[n:], source[2 * n :], source[3 * n :], source[4 * n :]
    for j in range(run):
        target[j] += a * source[j] + b * x1[j] + c * x2[j] + d * x3[j] + e * x4[j]


@fast
def _add3(target: Floats, source: Floats, w: Floats, n: int, run: int) -> None:
    a, b, c = w[0], w[1], w[2]
    x1, x2 = source[n:], source[2 * n :]
    for j in range(run):
        target[j] += a * source[j] + b * x1[j] + c * x2[j]


@fast
def _convolve_weights(row: Ints, gradient: Floats, x: Floats, error: Floats, n: int) -> None:
    """gradient[o, c, i, k] = sum over positions of error * shifted input."""
    channels, k_h, k_w, run = row[IN_C], row[K_H], row[K_W], error.shape[2]
    size = channels * k_h * k_w
    outputs = row[OUT_C]
    blocked = outputs // 2 * 2 if k_w == 5 else 0
    for o in range(0, blocked, 2):
        for c in range(channels):
            for i in range(k_h):
                place = row[WEIGHT] + o * size + (c * k_h + i) * k_w
                _dot5x2(gradient[place:], size, error[o], error[o + 1], x[c, i:], n, run)
    for o in range(blocked, outputs):
        for c in range(channels):
            for i in range(k_h):
                place = row[WEIGHT] + o * size + (c * k_h + i) * k_w
                for k in range(k_w):
                    total = np.float32(0)
                    for h in range(error.shape[1]):
                        e, source = error[o, h], x[c, h + i, k * n :]
                        for j in range(run):
                            total += e[j] * source[j]
                    gradient[place + k] = total


@fast
def _dot5x2(
    out: Floats, size: int, first: Floats, second: Floats, rows: Floats, n: int, run: int
) -> None:
    a = b = c = d = e = np.float32(0)
    p = q = r = s = t = np.float32(0)
    for h in range(len(first)):
        u, v, source = first[h], second[h], rows[h]
        x1, x2, x3, x4 = source[n:], source[2 * n :], source[3 * n :], source[4 * n :]
        for j in range(run):
            f, g = u[j], v[j]
            a += f * source[j]
            b += f * x1[j]
            c += f * x2[j]
            d += f * x3[j]
            e += f * x4[j]
            p += g * source[j]
            q += g * x1[j]
            r += g * x2[j]
            s += g * x3[j]
            t += g * x4[j]
    out[0], out[1], out[2], out[3], out[4] = a, b, c, d, e
    other = out[size:]
    other[0], other[1], other[2], other[3], other[4] = p, q, r, s, t


@fast
def _convolve_back(row: Ints, whole: Floats, x_error: Floats, error: Floats, n: int) -> None:
    """x_error[c, h + i] += weight * shifted error: two inputs by four outputs at a time."""
    channels, k_h, k_w, run = row[IN_C], row[K_H], row[K_W], error.shape[2]
    outputs, window = row[OUT_C], row[K_H] * row[K_W]
    size = channels * window
    x_error[:] = 0
    for c in range(0, channels, 2):
        # With an odd number of channels the last one goes alone.
        pair = c + 1 if c + 1 < channels else c
        for h in range(row[OUT_H]):
            for i in range(k_h):
                for k in range(k_w):
                    t0, t1 = x_error[c, h + i, k * n :], x_error[pair, h + i, k * n :]
                    w = whole[row[WEIGHT] + (c * k_h + i) * k_w + k :]
                    o = 0
                    while o + 4 <= outputs and pair != c:
                        _spread4x2(t0, t1, error[o, h], error[o + 1, h], error[o + 2, h],
                                   error[o + 3, h], w[o * size :], window, size, run)  # fmt: skip
                        o += 4
                    while o < outputs:
                        e = error[o, h]
                        p = w[o * size]
                        for j in range(run):
                            t0[j] += p * e[j]
                        if pair != c:
                            p = w[o * size + window]
                            for j in range(run):
                                t1[j] += p * e[j]
                        o += 1


@fast
def _spread4x2(
    t0: Floats, t1: Floats, e0: Floats, e1: Floats, e2: Floats, e3: Floats, w: Floats,
    window: int, size: int, run: int,
) -> None:  # fmt: skip
    a, b, c, d = w[0], w[size], w[2 * size], w[3 * size]
    p, q, r, s = w[window], w[window + size], w[window + 2 * size], w[window + 3 * size]
    for j in range(run):
        f, g, k, m = e0[j], e1[j], e2[j], e3[j]
        t0[j] += a * f + b * g + c * k + d * m
        t1[j] += p * f + q * g + r * k + s * m


@fast
def _maxpool(row: Ints, before: Floats, after: Floats, winners: NDArray[np.int32], n: int) -> None:
    """The largest of each window, and which it was; the first wins a tie, as in torch."""
    height, width, k_h, k_w = row[IN_H], row[IN_W], row[K_H], row[K_W]
    place = 0
    for c in range(row[OUT_C]):
        for h in range(row[OUT_H]):
            for w in range(row[OUT_W]):
                best, winner = after[place : place + n], winners[place : place + n]
                start = ((c * height + h * k_h) * width + w * k_w) * n
                first = before[start : start + n]
                for b in range(n):
                    best[b] = first[b]
                    winner[b] = 0
                for i in range(k_h):
                    for k in range(k_w):
                        if (i or k) and h * k_h + i < height and w * k_w + k < width:
                            other = before[start + (i * width + k) * n :]
                            number = np.int32(i * k_w + k)
                            for b in range(n):
                                larger = other[b] > best[b]
                                best[b] = other[b] if larger else best[b]
                                winner[b] = number if larger else winner[b]
                place += n


@fast
def _maxpool_back(
    row: Ints, before: Floats, after: Floats, winners: NDArray[np.int32], n: int
) -> None:
    height, width, k_h, k_w = row[IN_H], row[IN_W], row[K_H], row[K_W]
    before[:] = 0
    place = 0
    for c in range(row[OUT_C]):
        for h in range(row[OUT_H]):
            for w in range(row[OUT_W]):
                error, winner = after[place : place + n], winners[place : place + n]
                start = ((c * height + h * k_h) * width + w * k_w) * n
                for i in range(k_h):
                    for k in range(k_w):
                        if h * k_h + i < height and w * k_w + k < width:
                            number = np.int32(i * k_w + k)
                            target = before[start + (i * width + k) * n :]
                            for b in range(n):
                                target[b] = error[b] if winner[b] == number else np.float32(0)
                place += n


@fast
def _avgpool(row: Ints, before: Floats, after: Floats, n: int) -> None:
    """torch's adaptive average pooling of a series: segment s covers floor..ceil of its share."""
    length, segments = row[IN_W], row[OUT_W]
    after[:] = 0
    for c in range(row[OUT_C]):
        for s in range(segments):
            begin, end = s * length // segments, -(-((s + 1) * length) // segments)
            share = np.float32(1.0 / (end - begin))
            out = after[(c * segments + s) * n :]
            for t in range(begin, end):
                part = before[(c * length + t) * n :]
                for b in range(n):
                    out[b] += share * part[b]


@fast
def _avgpool_back(row: Ints, before: Floats, after: Floats, n: int) -> None:
    length, segments = row[IN_W], row[OUT_W]
    before[:] = 0
    for c in range(row[OUT_C]):
        for s in range(segments):
            begin, end = s * length // segments, -(-((s + 1) * length) // segments)
            share = np.float32(1.0 / (end - begin))
            error = after[(c * segments + s) * n :]
            for t in range(begin, end):
                part = before[(c * length + t) * n :]
                for b in range(n):
                    part[b] += share * error[b]
