"""The mathematics of `model.py`. It needs numpy.

A result is taken as a product: log(value) = base + the effects of everything on its way + noise. The base belongs to
the kind of path: the same leaf or another, the same rail or another. Almost all effects are zero, and the others are
found one after the other: the thing that explains most is taken first, its effect is taken out of all its results, and
the search goes on in the rest. So the partners of a slow node are not suspected for having met it.

**How sure.** Noise has heavy tails and is skewed, so no normal distribution is assumed. The noise is what is seen
outside of the thing in question, cut at CLIP scales. K(t) = log E exp(t x) is taken from that, with a few invented
heavy-tailed results that count when there are few real ones. Chernoff's bound then holds for any number of results n
with the mean m: P(mean >= m) <= exp(-n (t m - K(t))) for each t > 0. Its best exponent is the *evidence*, in nats.
The ends of a good fleet differ a little too. This natural spread is estimated from the middle of them, and the bound
is that of the sum of noise and spread. Where the spread cannot be seen, because there are few of a kind, a thing has
to differ by more than LEAST.

**Many questions.** The confidence is 1 - questions * looks * exp(-evidence): every thing that could have been named
counts as a question, and every round after which somebody looked counts as a look.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ndpy.fleet.results import End, Kind, Measurement, Pattern, Quantity
from ndpy.fleet.things import Family, Floats, Ints, Mode, Observations, Thing, families
from ndpy.fleet.topology import kind_of

#: Results further out than this many scales count like this many.
CLIP = 4.0
#: The same for things of which there are few: few results have to show how far out a fault is.
FAR = 6.0
#: What less is never named for, as a logarithm: 2 %.
LEAST = 0.02
#: Kinds of path with fewer results than this have no base to compare with.
FEWEST = 8
#: Fewer things of a kind than this do not show their natural spread.
SPREAD = 16
#: So few things of a kind are all looked at closely, and of others those that look bad.
FEW_THINGS = 16
#: How many nats a rival may lag behind to be named together with the first: a hundred to one.
RIVAL = 4.6

_T = np.geomspace(0.02, 8, 56)
_BINS = np.linspace(-2 * CLIP, 2 * CLIP, 321)
_MIDDLES = (_BINS[1:] + _BINS[:-1]) / 2
_POWERS = np.exp(np.outer(_T, _MIDDLES))


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that is at fault, or several of which one is.

    Attributes:
        things: the suspect, and rivals that the results do not tell from it.
        mode: which results say so.
        quantity: which quantity, or None for failures.
        effect: the logarithm of how much slower, or the share of results that failed.
        evidence: in nats.
        confidence: from 0 to 1.
        measurements: how many say so.
        partners: how many other ends took part in them.
        ends: the places of the suspect's ends.
        errors: those of failed results, and their words of `ndpy explain`.
    """

    things: tuple[Thing, ...]
    mode: Mode
    quantity: Quantity | None
    effect: float
    evidence: float
    confidence: float
    measurements: int
    partners: int
    ends: frozenset[int]
    errors: tuple[tuple[str, str], ...] = ()


def _invented(cut: float) -> Floats:
    """Eight results that nobody measured: Student's t with three degrees of freedom, cut here."""
    weights = np.where(np.abs(_MIDDLES) <= cut, (1 + _MIDDLES**2 / 3) ** -2, 0)
    made: Floats = 8 * weights / weights.sum()
    return made


# By where the results are cut. Means of few may lie beyond CLIP by chance. If no noise was invented there, they would
# be taken for impossible.
_INVENTED = {CLIP: _invented(CLIP), FAR: _invented(2 * CLIP)}


def cumulants(x: Floats, cut: float = CLIP) -> Floats:
    """K(t) of the noise `x` for each t of the grid, with the invented results. cut: where the results are cut."""
    bins = ((x + 2 * CLIP) * (len(_MIDDLES) / (4 * CLIP))).astype(np.int64)
    weights = np.bincount(np.clip(bins, 0, len(_MIDDLES) - 1), minlength=len(_MIDDLES)) + _INVENTED[cut]
    grown: Floats = np.log(_POWERS @ (weights / weights.sum()))
    return grown


def evidence(n: Floats, mean: Floats, grown: Floats, spread: float = 0.0) -> Floats:
    """Chernoff's exponent for means of n results, in nats."""
    n, mean = np.atleast_1d(n)[:, None], np.atleast_1d(mean)[:, None]
    exponents = n * (_T * mean - grown) - (n * _T * spread) ** 2 / 2
    best: Floats = np.maximum(exponents.max(axis=1), 0)
    return best


def median(x: Floats) -> float:
    """The median of one or more numbers, in a third of the time of numpy's."""
    half = len(x) // 2
    parted = np.partition(x, half)
    return float(parted[half] if len(x) % 2 else (parted[:half].max() + parted[half]) / 2)


def scale_of(x: Floats) -> float:
    """A robust standard deviation around zero. It is a little larger where there are few results to tell it."""
    return max(1.4826 * median(np.abs(x)) * (1 + 1.5 / np.sqrt(len(x))), 1e-3) if len(x) else 1.0


@dataclasses.dataclass
class Candidate:
    """A thing with its evidence, while findings are looked for."""

    family: Family
    label: int
    evidence: float
    rows: Ints
    effect: float
    plain: float
    members: float = 0.0


class Slow:
    """Results of one quantity that are slower than they should be."""

    def __init__(self, ends: Sequence[End], quantity: Quantity, data: Observations) -> None:
        self.quantity: Quantity | None = quantity
        kinds = sorted({kind_of(group) for end in ends for group in end.groups})
        alike = np.zeros(len(data.source), np.int64)
        for kind in kinds:
            names: dict[str, int] = {}
            label = np.array(
                [
                    next((names.setdefault(group, len(names)) for group in end.groups if kind_of(group) == kind), -1)
                    for end in ends
                ]
            )
            alike = 2 * alike + (label[data.source] == label[data.target])
        _, classes = np.unique(alike, return_inverse=True)
        units = np.bincount(classes, 1 / data.sizes[data.unit])
        kept = units[classes] >= FEWEST
        # A second pass over what is kept gives the units anew.
        round_ = data.unit[kept]
        self.data = Observations(data.source[kept], data.target[kept], round_, data.y[kept])
        self._classes = classes[kept]
        first = np.zeros(len(self.data.a), np.int64)
        first[self.data.unit] = np.arange(len(self.data.unit))
        self._unit_classes = self._classes[first]
        self._taken: list[tuple[Ints, float]] = []
        self.families = families(ends, self.data, directed=quantity is Quantity.BANDWIDTH)
        self._rows = [family.rows(self.data) for family in self.families]
        self._spreads: list[tuple[float, float]] = []
        self.refit()

    def refit(self) -> None:
        """Fit the base and the effects that were found, and scale what is left."""
        left = self.data.y.copy()
        for rows, effect in self._taken:
            left[rows] -= effect
        for _ in range(4 if self._taken else 1):
            for each in np.unique(self._classes):
                here = self._classes == each
                left[here] -= median(left[here])
            for number, (rows, effect) in enumerate(self._taken):
                more = median(left[rows])
                left[rows] -= more
                self._taken[number] = rows, effect + more
        self.left = left
        self.unit_left = self.data.per_unit(left)
        self._x = {}
        for by_unit, values, classes in (
            (True, self.unit_left, self._unit_classes),
            (False, self.left, self._classes),
        ):
            x = values.copy()
            for each in np.unique(classes):
                here = classes == each
                x[here] = np.clip(x[here] / scale_of(x[here]), -CLIP, CLIP)
            self._x[by_unit] = x, cumulants(x)
        self._spreads = [self._spread(number) for number in range(len(self.families))]

    def _means(self, number: int) -> tuple[Floats, Floats]:
        family, (rows, labels) = self.families[number], self._rows[number]
        counts = np.bincount(labels, minlength=len(family.things)).astype(float)
        sums = np.bincount(labels, self._x[family.by_unit][0][rows], minlength=len(family.things))
        return counts, sums / np.maximum(counts, 1)

    def _spread(self, number: int) -> tuple[float, float]:
        """(natural spread, what a thing has to differ by), in scales."""
        counts, means = self._means(number)
        known = counts >= 2
        x = self._x[self.families[number].by_unit][0]
        if known.sum() < SPREAD or self.families[number].kind is Kind.PATH:
            values = self.unit_left if self.families[number].by_unit else self.left
            return 0.0, LEAST / scale_of(values)
        seen = scale_of(means[known] - median(means[known]))
        return float(np.sqrt(max(0.0, seen**2 - median(x.var() / counts[known])))), 0.0

    def questions(self) -> int:
        return sum(int((np.bincount(labels) > 0).sum()) for _, labels in self._rows if len(labels))

    def candidates(self, need: float) -> list[Candidate]:
        """The things that may be named, those with the most evidence first."""
        rough: list[tuple[float, int, int]] = []
        for number, family in enumerate(self.families):
            counts, means = self._means(number)
            x, grown = self._x[family.by_unit]
            if len(counts) <= FEW_THINGS:
                # With few of a kind the base itself may be that of the faulty: each is looked at without it.
                rough += [(np.inf, number, int(label)) for label in np.flatnonzero(counts)]
                continue
            some = np.flatnonzero((counts > 0) & (means * np.sqrt(counts) > 2 * x.std()))
            spread, shift = self._spreads[number]
            found = evidence(counts[some], means[some] - x.mean() - shift, grown, spread)
            rough += [(float(value), number, int(label)) for label, value in zip(some, found, strict=True) if value > 1]
        rough.sort(reverse=True)
        made = [self._exact(number, label) for _, number, label in rough[:300]]
        return sorted(filter(None, made), key=lambda each: -each.evidence)

    def _exact(self, number: int, label: int) -> Candidate | None:
        """The evidence for one thing, against the noise and the base outside of it."""
        family, (rows, labels) = self.families[number], self._rows[number]
        inside = rows[labels == label]
        values, classes = (self.unit_left, self._unit_classes) if family.by_unit else (self.left, self._classes)
        out = np.ones(len(values), bool)
        out[inside] = False
        values = values.copy()
        for each in np.unique(classes[inside]):
            here = out & (classes == each)
            if here.sum() < 3:
                inside = inside[classes[inside] != each]
            else:
                values[classes == each] -= median(values[here])
        outside = values[out]
        if not len(inside) or len(outside) < 4:
            return None
        within = values[inside]
        effect = median(within)
        if effect < LEAST:
            return None
        scale = scale_of(np.concatenate([outside, within - effect]))
        far = FAR if len(family.things) <= FEW_THINGS else CLIP
        x, base = np.clip(within / scale, -far, far), np.clip(outside / scale, -far, far)
        grown = cumulants(np.concatenate([base - base.mean(), x - x.mean()]), far)
        spread, shift = self._spreads[number]
        if shift:
            shift = LEAST / scale
        n = len(x) * len(base) / (len(x) + len(base))
        mean = float(x.mean() - base.mean())
        best = float(evidence(np.array(n), np.array(mean - shift), grown, spread)[0])
        # Whole and parts are compared without the natural spread, which a fault of a whole group makes look larger.
        plain = float(evidence(np.array(n), np.array(mean), grown)[0])
        found = Candidate(family, label, best, inside, effect, plain)
        found.members = self._members(found, values, scale, base.mean(), grown, n / len(x))
        return found

    def _members(
        self, whole: Candidate, values: Floats, scale: float, base: float, grown: Floats, worth: float
    ) -> float:
        """What the parts of a thing explain if each is a suspect by itself, less the price of naming that many.

        `worth` is what a result counts: less than one, as the base is not known exactly either.
        """
        family = whole.family
        if family.kind not in (Kind.GROUP, Kind.NODE, Kind.ADAPTER):
            return 0.0
        finer = [
            (each, rows)
            for each, rows in zip(self.families, self._rows, strict=True)
            if each.mode is (Mode.ALL if family.mode is Mode.ACROSS else family.mode)
            and each.kind in ((Kind.NODE,) if family.kind is Kind.GROUP else (Kind.ADAPTER, Kind.RANK))
            and each.kind is not family.kind
        ]
        best = 0.0
        members = whole.family.members(whole.label)
        here = np.zeros(len(values), bool)
        here[whole.rows] = True
        inner = np.isin(self.data.a, list(members)) & np.isin(self.data.b, list(members))
        for each, (rows, labels) in finer:
            of = np.unique(each.label[list(members)])
            mine = here[rows] & np.isin(labels, of)
            rows, labels = rows[mine], labels[mine]
            if not len(rows):
                continue
            weights: Floats = np.where(inner[rows], 0.5, 1.0) if family.by_unit else np.ones(len(rows))
            counts = np.bincount(labels, weights)
            sums = np.bincount(labels, weights * np.clip(values[rows] / scale, -CLIP, CLIP))
            some = np.flatnonzero(counts)
            found = evidence(np.asarray(worth * counts[some], float), sums[some] / counts[some] - base, grown)
            best = max(best, float(np.maximum(found - np.log(len(each.things) + 1), 0).sum()))
        return best

    def take(self, found: Candidate) -> None:
        """Take the effect of a thing out of all its results."""
        self._taken.append((self.data.results(found.rows, found.family.by_unit), found.effect))


class Failed:
    """Results that are not there. The errors belong to the results, one each."""

    quantity: Quantity | None = None

    def __init__(self, ends: Sequence[End], data: Observations, errors: Sequence[tuple[str, str]]) -> None:
        self.data, self.errors = data, errors
        self._left = np.ones(len(data.y), bool)
        self.families = families(ends, data, directed=True)
        self._rows = [family.rows(data) for family in self.families]

    def refit(self) -> None:
        """Nothing is fitted: what a finding explains is left out."""

    def questions(self) -> int:
        return sum(int((np.bincount(labels) > 0).sum()) for _, labels in self._rows if len(labels))

    def candidates(self, need: float) -> list[Candidate]:
        made: list[Candidate] = []
        failed = np.isnan(self.data.y) & self._left
        values = {False: failed.astype(float), True: (self.data.per_unit(failed.astype(float)) > 0).astype(float)}
        for number, family in enumerate(self.families):
            rows, labels = self._rows[number]
            x = values[family.by_unit]
            n = np.bincount(labels, minlength=len(family.things)).astype(float)
            k = np.bincount(labels, x[rows], minlength=len(family.things))
            outside = len(x) - n
            usual = np.clip((x.sum() - k + 0.02) / (outside + 2), 0, 0.5)
            share = k / np.maximum(n, 1)
            with np.errstate(divide="ignore", invalid="ignore"):
                lacks = np.where(share < 1, (n - k) * np.log((1 - share) / (1 - usual)), 0)
                found = np.where(share > usual, k * np.log(share / usual) + lacks, 0)
            # A direction of its own is one more thing to choose.
            found -= 0.7 * (not family.by_unit)
            for label in np.flatnonzero(found > min(need / 3, 2.0)):
                chosen = Candidate(
                    family,
                    int(label),
                    float(found[label]),
                    rows[labels == label],
                    float(share[label]),
                    float(found[label]),
                )
                chosen.members = self._members(chosen, number, found)
                made.append(chosen)
        return sorted(made, key=lambda each: -each.evidence)

    def _members(self, whole: Candidate, number: int, found: Floats) -> float:
        """A group that fails as a whole fails in nearly all of its results."""
        return whole.evidence + 1 if whole.family.kind is Kind.GROUP and whole.effect < 0.8 else 0.0

    def take(self, found: Candidate) -> None:
        self._left[self.data.results(found.rows, found.family.by_unit)] = False


def columns(measurements: Iterable[Measurement]) -> dict[Quantity, tuple[Observations, list[tuple[str, str]]]]:
    """The results of pairs for each quantity. The sign is so that more is slower."""
    split: dict[Quantity, list[Measurement]] = {}
    for each in measurements:
        if each.pattern is Pattern.PAIRS and each.source != each.target:
            split.setdefault(each.quantity, []).append(each)
    made = {}
    for quantity, rows in split.items():
        values = np.array([each.value if each.value is not None else np.nan for each in rows], float)
        values[~(values > 0) | np.isinf(values)] = np.nan
        y = np.log(values) * (1 if quantity is Quantity.LATENCY else -1)
        places = np.array([(each.source, each.target, each.round) for each in rows], np.int64).T
        data = Observations(places[0], places[1], places[2], y)
        made[quantity] = data, [(each.error, each.problem) for each in rows]
    return made


def find(
    ends: Sequence[End], measurements: Sequence[Measurement], sure: float, looks: int
) -> tuple[list[Finding], dict[Quantity, Slow]]:
    """What is at fault, and the quantities with all known effects taken out."""
    split = columns(measurements)
    channels: list[Slow | Failed] = []
    lost = [each for each in measurements if each.pattern is Pattern.PAIRS and each.source != each.target]
    if any(np.isnan(data.y).any() for data, _ in split.values()):
        places = np.array([(each.source, each.target, each.round) for each in lost], np.int64).T
        y = np.array([np.nan if each.value is None or not each.value > 0 else 0.0 for each in lost])
        data = Observations(places[0], places[1], places[2], y)
        channels.append(Failed(ends, data, [(each.error, each.problem) for each in lost]))
    slow = {}
    for quantity, (data, _) in split.items():
        good = ~np.isnan(data.y)
        if good.any():
            kept = Observations(data.source[good], data.target[good], data.unit[good], data.y[good])
            slow[quantity] = Slow(ends, quantity, kept)
            channels.append(slow[quantity])
    questions = max(1, sum(channel.questions() for channel in channels)) * max(1, looks)
    need = float(np.log(questions / (1 - sure)))
    found: list[Finding] = []
    for channel in channels:
        found += _search(channel, need, questions, len(ends))
    return found, slow


def _search(channel: Slow | Failed, need: float, questions: int, count: int) -> list[Finding]:
    found: list[Finding] = []
    # More than this are not the exception, and nothing is left to compare with.
    most = max(4, count // 4)
    while len(found) < most:
        candidates = [each for each in channel.candidates(need) if each.plain > each.members]
        chosen = _choose(candidates, need)
        if not chosen:
            break
        for each, rivals in chosen:
            found.append(_finding(channel, each, rivals, questions))
            channel.take(each)
        channel.refit()
    return found


def _choose(candidates: list[Candidate], need: float) -> list[tuple[Candidate, list[Candidate]]]:
    """The best candidate with its rivals, and others of its sort that do not owe their evidence to it."""
    if not candidates or candidates[0].evidence < need:
        return []
    best = candidates[0]
    rivals: list[Candidate] = []
    for each in candidates[1:]:
        if each.evidence < best.evidence - RIVAL or len(rivals) == 3:
            break
        if _rivals(best, each) and not any(_same(each, known) for known in rivals):
            rivals.append(each)
    chosen = [(best, rivals)]
    if rivals:
        return chosen
    used: set[int] = set(best.rows.tolist())
    for each in candidates[1:]:
        if each.family is not best.family:
            continue
        shared = len(used.intersection(each.rows.tolist()))
        if each.evidence - 6 * shared >= need and 5 * shared <= len(each.rows):
            chosen.append((each, []))
            used.update(each.rows.tolist())
    return chosen


def _same(one: Candidate, other: Candidate) -> bool:
    mine, theirs = one.family.members(one.label), other.family.members(other.label)
    return mine <= theirs or theirs <= mine


def _rivals(best: Candidate, other: Candidate) -> bool:
    """Whether the two are different things that most of the same results speak of."""
    if _same(best, other) or best.family.by_unit != other.family.by_unit:
        return False
    shared = len(np.intersect1d(best.rows, other.rows))
    return 2 * shared >= max(len(best.rows), len(other.rows))


def _finding(channel: Slow | Failed, best: Candidate, rivals: list[Candidate], questions: int) -> Finding:
    results = channel.data.results(best.rows, best.family.by_unit)
    errors: list[tuple[str, str]] = []
    if isinstance(channel, Failed):
        results = results[np.isnan(channel.data.y[results])]
        errors = [channel.errors[row] for row in results[:1000]]
    ends = set(channel.data.source[results].tolist()) | set(channel.data.target[results].tolist())
    return Finding(
        things=tuple(each.family.thing(each.label) for each in (best, *rivals)),
        mode=best.family.mode,
        quantity=channel.quantity,
        effect=best.effect,
        evidence=best.evidence,
        confidence=float(min(max(0.0, 1 - questions * np.exp(-best.evidence)), 0.9999)),
        measurements=len(results),
        partners=len(ends - best.family.members(best.label)),
        ends=best.family.members(best.label),
        errors=tuple(errors),
    )


@dataclasses.dataclass(frozen=True)
class Standing:
    """What is known of each end once all findings are taken out.

    Attributes:
        suspicion: how much slower than the others each end looks, in standard errors. A failure counts as five.
        open: which ends may still be slower by `least` without being named.
    """

    suspicion: Floats
    open: NDArray[np.bool_]


def standing(
    ends: Sequence[End], measurements: Sequence[Measurement], slow: Iterable[Slow], named: set[int], least: float
) -> Standing:
    """Who is cleared. An end that is slower by `least` looks as good as that in one of a hundred fleets.

    `named` are the ends of findings: they are not open, and the failures with them are explained.
    """
    count = len(ends)
    suspicion, open_ = np.zeros(count), np.zeros(count, bool)
    for each in slow:
        data = each.data
        for values, owners in (
            (np.tile(each.unit_left, 2), np.concatenate([data.a, data.b])),
            (each.left, data.source),
            (each.left, data.target),
        ):
            if not len(values):
                open_[:] = True
                continue
            scale = scale_of(values)
            n = np.bincount(owners, minlength=count)
            # Cut above `least`: otherwise the far-out results of a slow end would clear it.
            cut = np.clip(values, -CLIP * scale, CLIP * scale + np.log1p(least))
            mean = np.bincount(owners, cut, minlength=count) / np.maximum(n, 1)
            error = float(cut.std()) / np.sqrt(np.maximum(n, 1))
            suspicion = np.maximum(suspicion, mean / np.maximum(error, 1e-9))
            # Means of few results are not normal: below three, nobody is cleared.
            open_ |= (n < 3) | (mean + 2.33 * error > np.log1p(least))
    for row in measurements:
        if row.value is None and not named & {row.source, row.target}:
            suspicion[[row.source, row.target]] += 5
            open_[[row.source, row.target]] = True
    open_[list(named)] = False
    return Standing(suspicion, open_)
