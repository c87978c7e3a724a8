"""A run's medians as one chart with choices: for JupyterLab, and as explore.html, the one page that runs a script.

Every number is made here, once, by bench.stats; the chart carries a row per cell, and its expressions only choose rows
and say how they read. Selects choose the place (FIELDS), what is shown, the baseline and a copy to highlight.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pandas as pd
from markupsafe import Markup

from kvnb.bench import results, stats
from kvnb.copies.base import FAMILIES
from kvnb.report import answers, files, null_block, plots
from kvnb.report.answers import label

if TYPE_CHECKING:
    from altair import Chart, LayerChart

NEEDS = {"altair": "altair", "vl_convert": "vl-convert-python"}  # module: package
FIELDS = ["shape", "layout", "dtype", "timer", "state"]
SHOWN, BAR = ["latency", "bandwidth", "speedup"], "\x1f"  # between the values of a place: in no name
BASELINES = (answers.ISSUE, null_block.WIDE, "torch.compile", answers.OURS, "limit.copy")  # after what vLLM ships
CROSS = "M-.7-1L0-.3L.7-1L1-.7L.3,0L1,.7L.7,1L0,.3L-.7,1L-1,.7L-.3,0L-1-.7Z"
SHAPES = dict(zip(plots.MARKERS, ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", CROSS)))
# Vega expressions: the title, in lines that a phone holds; what follows from the choices; what a drawn row holds
TITLE = (
    "[show == 'latency' ? 'Microseconds per call' : show == 'bandwidth' ? 'GB/s (bytes moved / time)'"
    " : 'Speedup over ' + baseline, machine, place < 0 ? 'Not measured so; measured with ' + shape + ' are'"
    " : shape + ' ' + layout + ' ' + dtype,"
    " place < 0 ? known[indexof(shapes, shape)] : 'timer ' + timer + ', state ' + state]"
)
FOLLOW = {"place": f"indexof(places, {' + bar + '.join(FIELDS)})", "k": "indexof(baselines, baseline)"}
RANGE = "' [' + format(datum.{}, '{f}') + ', ' + format(datum.{}, '{f}') + ']'"
COLUMNS = {
    "copy": "copies[datum.who]",
    **{name: f"datum['{name}' + k]" for name in ("ratio", "from", "to", "verdict")},
    "value": "show == 'latency' ? datum.us : show == 'bandwidth' ? datum.gbps : datum.ratio",
    "least": "show == 'latency' ? datum.low : show == 'bandwidth' ? datum.gbps * datum.us / datum.high : datum.from",
    "most": "show == 'latency' ? datum.high : show == 'bandwidth' ? datum.gbps * datum.us / datum.low : datum.to",
    "latency": "format(datum.us, ',.4r') + ' us' + " + RANGE.format("low", "high", f=",.4r"),
    "bandwidth": "format(datum.gbps, ',.4r') + ' GB/s'",
    "speedup": "isValid(datum.ratio) ? format(datum.ratio, '.3r') + " + RANGE.format("from", "to", f=".3r")
    + " + ' ' + verdicts[datum.verdict] : 'not measured'",
    # no scale's type can be chosen: times and speedups are drawn as their logarithms
    **{y: f"show == 'bandwidth' ? datum.{of} : log(datum.{of}) / LN2"
       for y, of in (("y", "value"), ("y1", "least"), ("y2", "most"))},
}  # fmt: skip


def missing(*modules: str) -> str:
    """Why explore.html cannot be made here; empty where it can. `modules`: those of NEEDS that matter, else all."""
    lacking = " ".join(NEEDS[name] for name in modules or NEEDS if find_spec(name) is None)
    return f"explore.html needs what is not installed here: pip install {lacking}" if lacking else ""


def chart(samples: pd.DataFrame | answers.Run) -> LayerChart:
    """The medians of one run (samples: of kvnb.load) with choices, as Vega-Lite: JupyterLab shows it as it is.

    Raises ValueError where altair is missing, for samples of several runs, and for a run without a timed cell.
    """
    if reason := missing("altair"):
        raise ValueError(reason)
    import altair as alt

    run = samples if isinstance(samples, answers.Run) else _run(samples)
    table, baselines = medians(run)
    table["place"], places = pd.factorize(table[FIELDS].agg(BAR.join, axis=1))
    copies = sorted({*zip(table["copy"], table["family"])}, key=lambda copy: (FAMILIES.index(copy[1]), copy[0]))
    known = table.groupby("shape", sort=False)[FIELDS[1:]].agg(lambda held: " or ".join(held.unique()))
    signals = {"bar": BAR, "places": list(places), "baselines": list(map(label, baselines)), "verdicts": stats.VERDICTS}
    signals |= {"shapes": list(known.index), "known": [", ".join(held) for held in known.to_numpy()]}
    names = [label(copy) for copy, _ in copies]
    signals |= {"machine": run.title, "copies": names}
    start = (table if (head := run.cells(**run.line)).empty else head).iloc[0].to_dict()  # the report's headline
    start |= {"shape": _shape(start)}
    selects = {name: (start[name], list(table[name].unique()), name) for name in FIELDS}
    selects |= {"show": (SHOWN[0], SHOWN, "show"), "baseline": (label(baselines[0]), signals["baselines"], "baseline")}
    selects |= {"standout": ("all", ["all", *names], "highlight")}
    params = [alt.param(name=name, value=value) for name, value in signals.items()]
    params += [alt.param(name=name, value=value, bind=alt.binding_select(options=options, name=words))
               for name, (value, options, words) in selects.items()]  # fmt: skip
    params += [alt.param(name=name, expr=words) for name, words in FOLLOW.items()]
    layers = _layers(alt, copies, sorted(table["num_tokens"].unique().tolist()))
    return (
        alt.layer(*layers, data=_data(alt, table.assign(who=table["copy"].map(label).map(names.index))))
        .add_params(*params)
        .properties(width=640, height=420, title=alt.Title(alt.ExprRef(TITLE)))
        .configure(font="system-ui, sans-serif", view=alt.ViewConfig(stroke=None))
        .configure_axis(labelFontSize=12, titleFontSize=12)
        .configure_title(anchor="start", frame="bounds", offset=12, fontSize=12)
    )


def explore(samples: pd.DataFrame | answers.Run) -> LayerChart:
    """`kvnb.explore`: chart, drawn by JupyterLab itself; Altair's own way, from now on off, would fetch scripts."""
    shown = chart(samples)
    import altair

    altair.renderers.enable("mimetype")
    return shown


def _run(samples: pd.DataFrame) -> answers.Run:
    """A run of grid padding holds each copy under each policy; of another run's, the default one counts."""
    return (null_block.PaddedRun if (samples["grid"] == null_block.GRID).any() else answers.Run)(samples)


def _shape(cell: dict) -> str:
    """Every field of a case that varies, but those with a select of their own and the tokens."""
    padded = f" {cell['padding']:.0%} padded{' at the tail' * (cell['padded'] == 'tail')}" if cell["padding"] else ""
    return answers.line_name(cell | {"dtype": answers.USUAL["dtype"]}) + padded


def medians(run: answers.Run) -> tuple[pd.DataFrame, list[str]]:
    """A row per timed cell of part `write`, and the baselines.

    Columns: FIELDS, copy, family, num_tokens, us, low, high (us), gbps; per baseline k the speedup over it ratio<k>,
    its interval from<k> to to<k>, and verdict<k>, a place in stats.VERDICTS. Raises ValueError where nothing was timed.
    """
    table = answers.rows_of(run.every_cell, {"status": "ok", "part": "write"})
    table = table[~table["copy"].str.match(rf"{stats.NOISE[0]}\b|limit\.event")]
    if table.empty:
        raise ValueError(f"run {run.first['run_id']} has no timed cell to explore: look into its column reason")
    table = table.assign(shape=[_shape(cell) for cell in table.to_dict("records")], us=1e6 * table["seconds"])
    table[["low", "high"]] *= 1e6
    held, timed = sorted(table["copy"].unique()), stats.Timed(run.samples[run.samples["part"] == "write"])
    baselines = [copy for copy in dict.fromkeys([run.shipped, *BASELINES]) if copy in held] or held[:1]
    for k, baseline in enumerate(baselines):
        columns = {"a": "copy", "speedup": f"ratio{k}", "low": f"from{k}", "high": f"to{k}", "verdict": f"verdict{k}"}
        rows = pd.concat([stats.compare(timed, copy, baseline)[[*stats.PLACE, *columns]] for copy in held])
        table = table.merge(rows.rename(columns=columns), on=[*stats.PLACE, "copy"], how="left")
        table[f"verdict{k}"] = table[f"verdict{k}"].map(stats.VERDICTS.index, na_action="ignore")
    return table, baselines


def _data(alt: ModuleType, table: pd.DataFrame) -> object:
    """The rows as tab-separated values, four digits a number: a fifth of JSON. No names, so no quotes."""
    columns = [name for name in table if name.rstrip("0123456789") in ("ratio", "from", "to", "verdict")]
    columns = ["who", "place", "num_tokens", "us", "low", "high", "gbps", *columns]
    rows = table.sort_values(["place", "copy", "num_tokens"], kind="stable")[columns]
    text = rows.to_csv(sep="\t", index=False, float_format="%.4g")
    return alt.InlineData(values=text, format=alt.CsvDataFormat(type="tsv", parse=dict.fromkeys(columns, "number")))


def _layers(alt: ModuleType, copies: list[tuple[str, str]], tokens: list[int]) -> list[Chart]:
    """Lines, intervals and points over one set of rows, a look per copy as in every figure."""
    looks = pd.DataFrame([plots.look(*copy) for copy in copies])
    solid, names = [1, 0], [label(copy) for copy, _ in copies]
    looks["linestyle"] = [solid if dash == "-" else [1.5 * part for part in dash[1]] for dash in looks["linestyle"]]
    color, shape, dash = (alt.Scale(domain=names, range=list(look)) for look in (
        looks["color"], looks["marker"].map(SHAPES), looks["linestyle"]))  # fmt: skip
    legend = alt.Legend(title=None, labelLimit=0, symbolLimit=len(names), symbolStrokeWidth=0)
    thousands = "datum.value % 1024 ? datum.value : datum.value / 1024 + 'k'"
    number = "format(show == 'bandwidth' ? datum.value : pow(2, datum.value), ',.4~r')"
    ticks = [round(power + math.log2(n), 6) for power in range(-10, 24) for n in (1, 1.5)]
    x = alt.Axis(values=tokens, title="tokens", labelOverlap=True, grid=False, labelExpr=thousands)
    values = alt.ExprRef(f"show == 'bandwidth' ? null : {ticks}")
    count = alt.ExprRef("show == 'bandwidth' ? 8 : 99")  # else Vega leaves every second value out
    how = {"labelExpr": number, "values": values, "tickCount": count}
    y = alt.Axis(title=None, domain=False, ticks=False, gridColor=plots.STYLE["grid.color"], **how)
    base = alt.Chart().transform_filter("datum.place == place")
    for name, words in COLUMNS.items():
        base = base.transform_calculate(**{name: words})
    base = base.transform_filter("datum.value > 0 && (show == 'latency' || datum.gbps > 0)").encode(
        x=alt.X("num_tokens:Q", axis=x, scale=alt.Scale(type="log", base=2, nice=False, padding=10)),
        y=alt.Y("y:Q", axis=y, scale=alt.Scale(zero=alt.ExprRef("show == 'bandwidth'"), nice=False)),
        color=alt.Color("copy:N", scale=color, legend=legend),
        opacity=alt.condition("standout == 'all' || datum.copy == standout", alt.value(1), alt.value(0.2)),
    )
    wide = alt.condition(f"datum.copy == '{answers.OURS}'", alt.value(2.4), alt.value(1.3))
    line = base.mark_line().encode(strokeDash=alt.StrokeDash("copy:N", scale=dash, legend=None), strokeWidth=wide)
    tips = ["copy:N", alt.Tooltip("num_tokens:Q", title="tokens", format=","), *[f"{name}:N" for name in SHOWN]]
    marker = alt.Shape("copy:N", scale=shape, legend=legend)
    point = base.mark_point(filled=True, size=60).encode(shape=marker, tooltip=tips)
    return [line, base.mark_rule(strokeWidth=2).encode(y="y1:Q", y2="y2:Q"), point]


def page(run: answers.Run | str | Path, target: Path, links: Iterable[tuple[str, str]] = ()) -> Path:
    """Write explore.html for a run, or the run in a file; returns `target`. `links`: (text, file) of other pages.

    All scripts lie in the file, and its policy lets nothing else run and no server be asked. Raises ValueError as
    chart does, and where vl-convert-python is missing, before anything is written.
    """
    if reason := missing():
        raise ValueError(reason)
    import altair as alt
    import vl_convert

    run = run if isinstance(run, answers.Run) else _run(results.load(run))
    fit = alt.AutoSizeParams(type="fit-x", contains="padding", resize=True)
    columns = alt.ExprRef("max(1, floor(containerSize()[0] / 300))")
    wide = chart(run).properties(width="container", autosize=fit)
    wide = wide.configure_legend(orient="bottom", columns=columns, labelFontSize=12)
    wide.config.background = "transparent"
    version = alt.SCHEMA_VERSION.rpartition(".")[0]
    spec = vl_convert.vegalite_to_vega(wide.to_dict(), vl_version=version)
    del spec["$schema"]  # names an older Vega than the one that comes with it
    values = {"spec": Markup(json.dumps(spec, separators=(",", ":")).replace("<", "\\u003c")), "links": list(links)}
    values["vega"] = Markup(vl_convert.javascript_bundle(vl_version=version))
    values |= {"run": run, "bytes": plots.BYTES, "grey": plots.COLOURS["limit"], "stats": stats}
    values["floors"] = answers.noise_floors(run)
    return files.write(target, "explore.html.j2", **values)
