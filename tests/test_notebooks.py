"""The pair checker and nbval's settings: the repository's notebooks pass, planted faults do not."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jupytext
import nbformat
import pytest
from check_pairs import MOST_LINES, faults
from nbformat import NotebookNode
from nbformat.v4 import new_output

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
SCRIPT = """\
# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A title

# %%
total = 1 + 1
print(total)

# %% tags=["nbval-ignore-output"]
total
"""


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """A folder with one script and its notebook, as if run."""
    (tmp_path / "sum.py").write_text(SCRIPT, encoding="utf-8")
    notebook = jupytext.reads(SCRIPT, fmt="py:percent")
    first, second = notebook.cells[1:]
    first.execution_count, first.outputs = 1, [new_output("stream", name="stdout", text="2\n")]
    second.execution_count = 2
    second.outputs = [new_output("execute_result", {"text/plain": "2"}, execution_count=2)]
    nbformat.write(notebook, tmp_path / "sum.ipynb")
    return tmp_path


def test_notebooks_of_this_repository() -> None:
    assert faults(NOTEBOOKS) == []


def test_a_good_pair_passes(pair: Path) -> None:
    assert faults(pair) == []


def strip(notebook: NotebookNode) -> None:
    for cell in notebook.cells[1:]:
        cell.execution_count, cell.outputs = None, []


def skip_a_count(notebook: NotebookNode) -> None:
    notebook.cells[2].execution_count = 7


def change_source(notebook: NotebookNode) -> None:
    notebook.cells[1].source = notebook.cells[1].source.replace("1 + 1", "1 + 2")


def add_semicolon(notebook: NotebookNode) -> None:
    notebook.cells[2].source += ";"


def change_type(notebook: NotebookNode) -> None:
    notebook.cells[0] = nbformat.v4.new_raw_cell(notebook.cells[0].source)


def drop_tags(notebook: NotebookNode) -> None:
    del notebook.cells[2].metadata["tags"]


def add_cell(notebook: NotebookNode) -> None:
    notebook.cells.append(nbformat.v4.new_markdown_cell("More."))


def remove_cell(notebook: NotebookNode) -> None:
    del notebook.cells[2]


def fail(notebook: NotebookNode) -> None:
    notebook.cells[1].outputs.append(new_output("error", ename="ValueError", evalue="no", traceback=[]))


def warn_with_a_path(notebook: NotebookNode) -> None:
    text = "/home/someone/lib/module.py:3: UserWarning: old\n"
    notebook.cells[1].outputs.append(new_output("stream", name="stderr", text=text))


def print_a_windows_path(notebook: NotebookNode) -> None:
    notebook.cells[1].outputs.append(new_output("stream", name="stdout", text="wrote C:\\Users\\someone\\x.png\n"))


def show_a_path(notebook: NotebookNode) -> None:
    notebook.cells[2].outputs[0].data["text/plain"] = "PosixPath('/tmp/tmpa1b2/x.kdtr')"


@pytest.mark.parametrize(
    ("plant", "complaint"),
    [
        (strip, "cell 2 has count None, expected 1"),
        (skip_a_count, "cell 3 has count 7, expected 2"),
        (change_source, "cell 2 differs from the script, first in line 1: 'total = 1 + 2', in the script"),
        (add_semicolon, "cell 3 differs from the script"),
        (change_type, "cell 1 is raw, in the script markdown"),
        (drop_tags, "cell 3 has tags [], in the script ['nbval-ignore-output']"),
        (add_cell, "4 cells, its script has 3"),
        (remove_cell, "2 cells, its script has 3"),
        (fail, "cell 2 holds an error, ValueError: no"),
        (warn_with_a_path, "cell 2 printed a path of the machine that ran it, '/home/someone/lib/module.py'"),
        (print_a_windows_path, "cell 2 printed a path"),
        (show_a_path, "cell 3 printed a path of the machine that ran it, '/tmp/tmpa1b2/x.kdtr'"),
    ],
)
def test_a_planted_fault_is_found(pair: Path, plant: Callable[[NotebookNode], None], complaint: str) -> None:
    notebook = nbformat.read(pair / "sum.ipynb", as_version=4)
    plant(notebook)
    nbformat.write(notebook, pair / "sum.ipynb")
    found = faults(pair)
    assert any(complaint in fault for fault in found), found
    assert all(fault.startswith("sum.ipynb: ") for fault in found)


@pytest.mark.parametrize("missing", ["sum.py", "sum.ipynb"])
def test_half_a_pair_is_found(pair: Path, missing: str) -> None:
    (pair / missing).unlink()
    assert [fault for fault in faults(pair) if f"no {missing} beside it" in fault]


def test_a_long_script_is_found(pair: Path) -> None:
    script = pair / "sum.py"
    script.write_text(script.read_text(encoding="utf-8") + "\n" * MOST_LINES, encoding="utf-8")
    assert any("at most 500" in fault for fault in faults(pair))


@pytest.mark.parametrize(
    "harmless", ["7.5 tokens/s", "read/write", "https://arxiv.org/abs/2309.00071", "</div></div>", "a / b / c"]
)
def test_what_only_looks_like_a_path_passes(pair: Path, harmless: str) -> None:
    notebook = nbformat.read(pair / "sum.ipynb", as_version=4)
    notebook.cells[1].outputs[0].text = harmless
    nbformat.write(notebook, pair / "sum.ipynb")
    assert faults(pair) == []


PRINTED = {  # source: (stored output, does nbval accept it)
    "print(0.12345678)": ("0.12345999", True),  # past five decimals
    "print(0.123456)": ("0.123466", False),
    "print(1234)": ("1235", False),
    "print(3.5, 'tokens a round')": ("3.6 tokens a round", False),
    "print(object())": ("<object object at 0x7f0000000000>", True),
    "import warnings; warnings.warn('careful')": (None, False),  # to stderr, which is compared
}


def test_nbval_sees_every_number(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook()
    for count, (source, (stored, _)) in enumerate(PRINTED.items(), start=1):
        outputs = [] if stored is None else [new_output("stream", name="stdout", text=stored + "\n")]
        notebook.cells.append(nbformat.v4.new_code_cell(source, execution_count=count, outputs=outputs))
    nbformat.write(notebook, tmp_path / "planted.ipynb")
    config = Path(__file__).with_name("nbval_sanitize.cfg")
    options = [
        "--nbval",
        "--nbval-current-env",
        f"--nbval-sanitize-with={config}",
        "-q",
        "-rA",
        "-p",
        "no:cacheprovider",
    ]
    command = [sys.executable, "-m", "pytest", *options, "planted.ipynb"]
    report = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    passed = {int(number) for number in re.findall(r"^PASSED .*::Cell (\d+)", report, re.MULTILINE)}
    failed = {int(number) for number in re.findall(r"^FAILED .*::Cell (\d+)", report, re.MULTILINE)}
    accepted = {number for number, (_, accepts) in enumerate(PRINTED.values()) if accepts}
    assert (passed, failed) == (accepted, set(range(len(PRINTED))) - accepted), report
