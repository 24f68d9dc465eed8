"""Writes the results of a reproduction from its finished runs: tables, figures and a page.

OUT/reproduction.md          the page
OUT/tables/TABLE.md, .tex    the paper's tables, with its numbers next to ours
OUT/figures/figureN.png      the paper's figures
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eepo.evaluation.trained_run import model_label
from eepo.experiments.experiment import Experiment, Run
from eepo.experiments.plan import REPORT, TUNE, Method, Selection
from eepo.experiments.reproduce_plan import Reproduction
from eepo.experiments.reproduce_targets import BASELINES
from eepo.experiments.status import status_lines
from eepo.experiments.tuning import score
from eepo.reports.benchmark_tables import ResultTable, format_latex, format_markdown
from eepo.reports.figure_list import image_bytes
from eepo.reports.paper_figures import FIGURES, HyperPanel, PaperData, PaperFigure
from eepo.reports.paper_numbers import BASE, EEPO, GRPO, TABLES
from eepo.reports.paper_page import PageContents, page_text
from eepo.reports.paper_table import (
    Methods,
    has_papers_sets,
    paper_table,
    papers_own_table,
    sampled_table,
)
from eepo.reports.records import Run as RunRecords
from eepo.reports.records import by_method, read_run
from eepo.reports.run_lines import Line, as_run, line_title
from eepo.reports.shared_start import share_start_evaluations
from eepo.runs.runlog import METRICS, write_atomically
from eepo.runs.writing import writing
from eepo.types import UserError

PAGE, TABLES_FOLDER, FIGURES_FOLDER = "reproduction.md", "tables", "figures"


def write_results(reproduction: Reproduction, command: str) -> list[Path]:
    """Write everything that the finished runs allow; return the files, the page first."""
    experiment = reproduction.experiment()
    runs = reported_runs(experiment)
    if not runs:
        raise UserError(f"{experiment.out} has no finished run of paper/{reproduction.target.name}")
    tables = make_tables(reproduction, by_method(runs))
    files = [file for name, _, table in tables for file in _write_table(experiment, name, table)]
    trained = [run for run in share_start_evaluations(runs) if run.name != BASE]
    data = PaperData(trained, hyper_panels(reproduction, experiment), _scores(experiment))
    drawn = _write_figures(data, experiment.out / FIGURES_FOLDER)
    status = [*status_lines(experiment, Selection())]
    counts = status[0].removeprefix(f"{experiment.plan.source}: ")
    contents = PageContents(
        title=f"Reproduction of paper/{reproduction.target.name}: {reproduction.config.model.path}",
        command=command,
        status=[f"- {counts}", *(f"- {line}" for line in status if line.startswith("failed"))],
        tables=[(heading, table) for _, heading, table in tables],
        figures=drawn,
        runs=runs,
        chosen=_chosen(experiment),
    )
    page = experiment.out / PAGE
    write_atomically(page, page_text(contents))
    images = [experiment.out / FIGURES_FOLDER / figure.file for figure in drawn]
    return [page, *files, *images]


def reported_runs(experiment: Experiment) -> list[RunRecords]:
    """Return the finished runs of the report, in the order of the plan's methods.

    They are named by their method, and by its value if every value is reported. Without the folder
    of a run, its line has to do: it has no intervals over problems.
    """
    order = [*experiment.plan.methods]
    lines = sorted(experiment.done(REPORT), key=lambda line: order.index(line["method"]))
    return [_records(experiment, line) for line in lines]


def make_tables(reproduction: Reproduction, methods: Methods) -> list[tuple[str, str, ResultTable]]:
    """Return (file name, heading, table): those of the paper, then one with sampled measures."""
    label = model_label(reproduction.config.model.path)
    tables = []
    for name in reproduction.target.tables:
        paper = TABLES[name]
        tables.append((name, paper.title, paper_table(paper, methods, label)))
        if not has_papers_sets(paper, methods):
            heading = f"{paper.title} in the paper"
            tables.append((f"{name}_in_the_paper", heading, papers_own_table(paper)))
    tables.append(("samples", "Samples and lengths", sampled_table(methods, {BASE: label})))
    return tables


def hyper_panels(reproduction: Reproduction, experiment: Experiment) -> list[HyperPanel]:
    """Return the scores of every baseline at every value: of tuning, or of the report."""
    plan, panels = experiment.plan, []
    for name, baseline in BASELINES.items():
        if name not in plan.methods:
            continue
        phase = TUNE if plan.methods[name].is_tuned else REPORT
        scores: dict[str, list[float]] = {}
        for line in experiment.done(phase):
            if line["method"] == name:
                value = line["value"] or _fixed_value(plan.methods[name], baseline.knob)
                scores.setdefault(value, []).append(score(line, plan.objective))
        section, _, knob = baseline.knob.partition(".")
        default = getattr(getattr(reproduction.config, section), knob)
        panels.append(HyperPanel(name, baseline.knob, scores, str(default)))
    return panels


def _fixed_value(method: Method, knob: str) -> str:
    """Return the value of a baseline that is not tuned."""
    return next(text.partition("=")[2] for text in method.knobs if text.startswith(f"{knob}="))


def _scores(experiment: Experiment) -> dict[str, list[float]]:
    """Return the scores of GRPO and EEPO, one for each seed."""
    scores: dict[str, list[float]] = {}
    for line in experiment.done(REPORT):
        if line["method"] in (GRPO, EEPO):
            scores.setdefault(line["method"], []).append(score(line, experiment.plan.objective))
    return scores


def _records(experiment: Experiment, line: Line) -> RunRecords:
    method = experiment.plan.methods[line["method"]]
    name = line_title(line) if method.every_value else line["method"]
    run = Run(REPORT, line["regime"], line["method"], line["value"], line["seed"])
    folder = experiment.folder(run)
    if not (folder / METRICS).is_file():
        return as_run(line, name)
    return dataclasses.replace(read_run(folder), name=name)


def _chosen(experiment: Experiment) -> dict[str, str]:
    """Return the values that tuning chose, of the methods whose report has begun."""
    plan = experiment.plan
    return {
        line["method"]: f"{plan.methods[line['method']].tuned_knob} = {line['value']}"
        for line in experiment.done(REPORT)
        if plan.methods[line["method"]].is_tuned
    }


def _write_table(experiment: Experiment, name: str, table: ResultTable) -> list[Path]:
    folder = experiment.out / TABLES_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    latex = "% needs \\usepackage{booktabs}\n" + format_latex(table)
    write_atomically(folder / f"{name}.md", format_markdown(table))
    write_atomically(folder / f"{name}.tex", latex)
    return [folder / f"{name}.md", folder / f"{name}.tex"]


def _write_figures(data: PaperData, folder: Path) -> list[PaperFigure]:
    """Draw the figures that the runs have data for; return them."""
    drawn = []
    folder.mkdir(parents=True, exist_ok=True)
    for figure in FIGURES:
        image = figure.draw(data)
        if image is not None:
            file = folder / figure.file
            with writing(file):
                file.write_bytes(image_bytes(image, "png"))
            drawn.append(figure)
    return drawn
