"""No product code turns bytes into code or objects: no pickle in any of its forms, no eval, no shell, no YAML."""

from __future__ import annotations

import ast
from collections.abc import Generator, Iterator, Mapping

from style.sources import Finding, Source, Sources, imported

PRODUCT = ("fedplat", "server/fedplat_server", "client/fedplat_client", "examples", "benchmarks")

MODULES = frozenset(
    {
        *("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"),
        *("yaml", "ruamel", "copyreg", "code", "codeop", "ray"),
    }
)
"""Modules that exist to make objects or code from bytes."""
FUNCTIONS = frozenset({"eval", "exec", "compile", "__import__", "execfile"})
"""Built-in functions that run text."""
CALLS = frozenset(
    {
        "torch.load",
        "torch.save",
        "torch.jit.load",
        "torch.package.PackageImporter",
        "np.load",
        "np.save",
        "np.savez",
        "np.fromfile",
        "numpy.load",
        "numpy.save",
        "os.system",
        "os.popen",
        "os.execv",
        "os.execvp",
        "subprocess.getoutput",
        "subprocess.getstatusoutput",
        "asyncio.create_subprocess_shell",
        "logging.config.listen",
    }
)
ALLOWED = {
    "importlib.import_module": {
        "fedplat/config/user_code.py": "functions that a user's own file, an operator or a client's owner names",
        "fedplat/__init__.py": "modules of fedplat, whose names stand there",
        "fedplat/admin/__init__.py": "modules of fedplat, whose names stand there",
        "fedplat/cli/app.py": "modules of fedplat, whose names stand there",
        "client/fedplat_client/__init__.py": "modules of fedplat, whose names stand there",
        "fedplat/privacy/losses.py": "dp-accounting's modules, whose names stand there",
        "benchmarks/gpu/language_model.py": "two packages, whose names stand there",
        "benchmarks/packed_data.py": "the packages of other formats, whose names stand there",
        "benchmarks/update_codecs.py": "a module of the examples, whose name stands there",
        "benchmarks/peers/flower_secagg.py": "a peer's modules, whose names stand there",
        "benchmarks/papers/reproduction.py": "a program of its own folder, by the name that it gave its worker",
        "benchmarks/papers/reproductions_page.py": "the programs of its own folder, whose names stand there",
    },
    "multiprocessing": {
        "benchmarks/parallel_ranks.py": "pickles between the benchmark and the ranks that it starts",
        "server/fedplat_server/training/evaluation.py": "pickles between the daemon and its own child",
        "fedplat/cli/planning.py": "pickles between the command and the processes that it starts to compute",
        "fedplat/simulation/engines/worker_pool.py": "forks its workers; msgpack over sockets without names",
        "fedplat/simulation/engines/client_apps.py": "forks its workers; msgpack over pipes without names",
        "benchmarks/aggregation.py": "pickles between the benchmark and its own child",
        "benchmarks/packed_data.py": "pickles between the benchmark and its own child",
        "benchmarks/pool_aggregation.py": "pickles between the benchmark and its own child",
        "benchmarks/robust_aggregation.py": "pickles between the benchmark and its own child",
        "benchmarks/papers/reproduction.py": "pickles between the program and its own workers",
    },
    "ray": {
        "fedplat/simulation/engines/ray.py": "pickles between machines of a researcher's own cluster",
        "benchmarks/peers/flower_simulation.py": "a peer's own simulation, on this machine",
    },
    "pickle": {
        "fedplat/testing/learners.py": "a test's own object, pickled and read in memory",
        "fedplat/flower/durable.py": "a strategy's state and rounds, in a file that only the server writes",
        "fedplat/flower/grid.py": "the messages of a strategy that are on their way, in the same file",
    },
    "torch.save": {"examples/flower/digits/digits/server_app.py": "writes the model of a Flower app, and reads none"},
    "np.load": {
        "benchmarks/packed_data.py": "the small files that the benchmark has written, without pickle",
        "fedplat/cli/data.py": "arrays of files that the command names, without pickle",
        "fedplat/simulation/data/sources/common.py": "arrays of the researcher's own file, without pickle",
        "examples/secure/client.py": "the data that the demo gave this client, without pickle",
        "examples/secure/run.py": "what the demo's own clients have computed, without pickle",
    },
    "np.save": {
        "benchmarks/packed_data.py": "small files, for the comparison",
        "examples/secure/client.py": "what a client has computed, for the comparison at the end of the demo",
    },
    "np.savez": {
        "examples/secure/run.py": "the data of the demo's clients",
        "benchmarks/peers/nvflare_app/noop_nvflare.py": "writes what a peer would write, and never reads it",
    },
}
"""Calls that run code or unpickle on purpose: where they are, and why no foreign input reaches them."""


def check(sources: Sources, allowed: Mapping[str, Mapping[str, str]] = ALLOWED) -> Iterator[Finding]:
    found: set[tuple[str, str]] = set()
    for source in sources:
        for name, line in dangers(source) if source.is_module and source.is_in(*PRODUCT) else ():
            found.add((name, source.path))
            if source.path not in allowed.get(name, {}):
                yield Finding(source.path, line, f"{name} may run foreign code")
    for name, places in allowed.items():
        for place, why in places.items():
            if (name, place) not in found or not why:
                yield Finding(place, 0, f"{name} is in ALLOWED of {__name__}, and not there or without a reason")


def dotted(node: ast.expr) -> str:
    """Return `a.b.c` for an expression that is a name, otherwise an empty text."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


def of_call(node: ast.Call) -> Generator[str]:
    name = dotted(node.func)
    if name in FUNCTIONS or name in CALLS or name.removeprefix("importlib.") == "import_module":
        yield "importlib.import_module" if name.endswith("import_module") else name
    for keyword in node.keywords:
        is_off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
        if keyword.arg in ("allow_pickle", "shell") and not is_off:
            yield f"{name}({keyword.arg}=...)"


def dangers(source: Source) -> Generator[tuple[str, int]]:
    """Yield everything in a module that could run foreign input, with its line."""
    for node in source.nodes:
        for module in (name.lstrip(".") for name in imported(node)):
            if module.partition(".")[0] in MODULES or module in CALLS:
                yield module, getattr(node, "lineno", 0)
            elif module in ("multiprocessing", "concurrent.futures.ProcessPoolExecutor"):
                yield "multiprocessing", getattr(node, "lineno", 0)
        if isinstance(node, ast.Call):
            for name in of_call(node):
                yield name, node.lineno
