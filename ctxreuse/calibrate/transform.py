"""The Karhunen-Loève transform of a channel group under the model's own metric, and its whole-number form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse.calibrate.gather import GroupStats
from ctxreuse.codec.profile import ChannelGroup
from ctxreuse.rope import Rotary

__all__ = ["BASIS_LIMIT", "Basis", "Transform", "solve"]

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

#: Entries of the basis are whole numbers up to this: sums over 256 channels then fit 32 bits.
BASIS_LIMIT = 8191
#: Components whose spread is below so many steps of a level get a basis of bytes there: together that adds about 2 %
#: to a level's squared error (.3 % below one step, 2 % from one to two, 7 % from two to four, but 35 % above).
_NARROW = 4.0


class Transform(NamedTuple):
    """``y = forward @ z`` and ``z ~ inverse @ y`` of normalised vectors z; components by variance, largest first.

    ``forward`` [C, C], ``inverse`` [C, C] (columns are components), ``variance`` [C]. ``inverse`` is already the
    whole-number basis times its gain, so that nothing is lost between what is measured and what is decoded.
    """

    stats: GroupStats
    forward: Floats
    inverse: Floats
    variance: Doubles
    basis: npt.NDArray[np.int16]
    gain: Floats

    def narrow(self, step: float) -> int:
        """Return the component from which on a level of this step has a basis of bytes (`ChannelGroup.rounded`).

        Their integers are small, and so is what it costs.
        """
        return int((np.sqrt(self.variance) >= _NARROW * step).sum())

    def inverse_at(self, step: float, components: int) -> Floats:
        """Return the first columns of ``inverse`` as a level of this step decodes with them."""
        group = self.group(components).rounded(self.narrow(step))
        return np.asarray((group.basis.T * self.gain[:, None]).astype(np.float32))

    def group(self, components: int) -> ChannelGroup:
        """Return the group as a profile stores it, with the first ``components``."""
        return ChannelGroup(
            first=self.stats.channels.first,
            heads=self.stats.channels.heads,
            log_rms=self.stats.log_rms,
            mean=self.stats.mean.astype(np.float32),
            gain=self.gain,
            forward=self.forward[:components],
            basis=self.basis[:components],
            large=self.stats.channels.joint,
        )


class Basis(NamedTuple):
    """The transforms of all channel groups, and how each layer rotates K."""

    transforms: Sequence[Transform]
    rotaries: dict[int, Rotary]


def solve(stats: GroupStats, *, epsilon: float) -> Transform:
    """The transform of one group: M = fisher + epsilon * mean trace, R = M^(1/2), U the eigenvectors of R S R.

    An error e of the normalised vector costs e'Me / 2 nats; in y = U'R z it costs |error|^2 / 2 whatever its direction,
    and the components are uncorrelated. ``epsilon`` keeps directions whose gradients were small by chance. M has a
    block for each plane.
    """
    size, width = len(stats.mean), stats.fisher.shape[-1]
    root, inverse_root = np.empty((2, *stats.fisher.shape))
    for i, fisher in enumerate(stats.fisher):
        trace = float(np.trace(fisher)) / width
        # Without any gradient (a layer that nothing reads) the plain transform is left, at a weight that codes nothing.
        weight, turn = np.linalg.eigh(fisher + max(epsilon * trace, 1e-30) * np.eye(width))
        root[i] = (turn * np.sqrt(weight)) @ turn.T
        inverse_root[i] = (turn / np.sqrt(weight)) @ turn.T

    def by_planes(maps: Doubles, rows: Doubles) -> Doubles:
        return np.asarray((maps @ rows.reshape(len(maps), width, -1)).reshape(size, -1))

    spread = by_planes(root, by_planes(root, stats.moment).T)
    variance, axes = np.linalg.eigh((spread + spread.T) / 2)
    variance, axes = np.maximum(variance[::-1], 0), axes[:, ::-1]
    # An eigenvector's sign is chance: with the largest entry positive, equal statistics give equal bytes.
    largest = np.abs(axes).argmax(0)
    axes = axes * np.where(axes[largest, np.arange(size)] < 0, -1, 1)
    forward, inverse = by_planes(root, axes).T, by_planes(inverse_root, axes)
    gain = (np.abs(inverse).max(1) / BASIS_LIMIT).astype(np.float32)
    basis = np.rint(inverse / gain[:, None].astype(np.float64))
    whole = np.clip(basis, -BASIS_LIMIT, BASIS_LIMIT).astype(np.int16)
    return Transform(
        stats,
        forward.astype(np.float32),
        (whole * gain[:, None]).astype(np.float32),
        variance,
        np.ascontiguousarray(whole.T),
        gain,
    )
