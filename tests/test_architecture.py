"""Architecture of the package: who may import whom, where the engine may be named, how large a piece may grow.

A new package gets its place in PACKAGES; a new restriction gets its line in CONFINED.
"""

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.tools.sources import Module, imports, module_names, modules, uncollected

PACKAGES = (
    ("base", "config", "arch"),
    ("core",),
    ("hf", "data", "checkpoint", "runs"),
    ("convert", "report", "watch", "launch"),
    ("training", "plan", "api"),
    ("preflight", "serve", "verify"),
    ("cli", "loss", "__main__", "__init__", "tools"),
)
"""Packages from the bottom up, by lines of the picture: each imports only from those before it, wherever the import
stands. `core` is to be understood without what lies above it; `loss` has names of version 0.2."""
ORDER = tuple(package for line in PACKAGES for package in line)
WITHOUT_TORCH = r"mtrain\.(base|config|arch|runs|watch|launch|plan|hf\.(schema|tokenizer|configuration))(\..*)?"

ROOMS_OF_CORE = ("kernels", "state", "loss", "batch", "ranks", "layers", "engine", "step")
"""Folders and modules of `mtrain/core` from the bottom up: each imports only from those before it."""

MAX_FILES_IN_A_FOLDER = 20
MAX_FILE_LINES, MAX_TABLE_LINES = 500, 700
TABLES = r"mtrain/(hf/schema/(config|table)|config/(megatron_fields|rules))\.py"
"""Files whose subject is one table, which may be longer."""
MAX_FILES_UNDER_A_STEP = 160
MAX_FUNCTION_LINES = 70


def package_of(target: str) -> str | None:
    """Returns the package of an imported name; None where it is not ours."""
    parts = target.split(".")
    if parts[0] == "tools":
        return "tools"
    if parts[0] != "mtrain":
        return None
    return parts[1] if len(parts) > 1 else "__init__"


def upward(order: tuple[str, ...], room_of: Callable[[str], str | None]) -> list[str]:
    """Lists the imports from a room that is not below, of rooms from the bottom up."""
    return [
        f"{module.path.relative_to(ROOT)}:{each.line} imports {each.target}"
        for module in modules()
        if (room := room_of(module.name)) is not None
        for each in imports(module)
        if not (module.name == "mtrain" and each.is_for_types_only)  # the public API, named for type checkers
        if (target := room_of(each.target)) is not None and order.index(target) > order.index(room)
    ]


def test_every_package_has_its_place() -> None:
    assert {package_of(module.name) for module in modules()} == set(ORDER)
    assert {room_of_core(module.name) for module in modules()} == {*ROOMS_OF_CORE, None}


def test_imports_go_downwards() -> None:
    assert upward(ORDER, package_of) == []
    reversed_order = tuple(reversed(ORDER))
    assert len(upward(reversed_order, package_of)) > 1000  # an import that goes up would be found


def room_of_core(target: str) -> str | None:
    """Returns the room of a module of `mtrain/core`; None where it is none."""
    parts = target.split(".")
    return parts[2] if parts[:2] == ["mtrain", "core"] and len(parts) > 2 else None


def test_no_import_in_the_core_goes_upwards() -> None:
    assert upward(ROOMS_OF_CORE, room_of_core) == []


def test_the_core_stands_alone() -> None:
    assert ORDER.index("core") == len(("base", "config", "arch"))
    reached, rest = set[str](), ["mtrain.core.step.step"]
    graph = import_graph()
    while rest:
        if (name := rest.pop()) not in reached:
            reached.add(name)
            rest += graph[name]
    assert {package_of(name) for name in reached} == {"base", "config", "arch", "core"}
    assert len(reached) <= MAX_FILES_UNDER_A_STEP


def import_graph() -> dict[str, set[str]]:
    """Returns the modules that each module imports."""
    return {
        module.name: {
            each.target
            for each in imports(module)
            if each.target in module_names() and each.target != module.name
            if not (module.name == "mtrain" and each.is_for_types_only)  # the public API, named for type checkers
        }
        for module in modules()
    }


def test_there_are_no_import_cycles() -> None:
    """Counts imports for type checkers as well: two modules that name each other's types are one subject."""
    assert import_cycle(import_graph()) is None


def import_cycle(graph: dict[str, set[str]]) -> list[str] | None:
    """Returns the modules of one cycle; None where there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        cycle: list[str] = error.args[1]
        return cycle
    return None


def test_an_import_cycle_would_be_found() -> None:
    assert import_cycle({"a": {"b"}, "b": {"a"}}) is not None


def _imports_of(prefix: str) -> Callable[[Module], Iterator[int]]:
    def find(module: Module) -> Iterator[int]:
        for each in imports(module):
            if f"{each.target}.".startswith(f"{prefix}."):
                yield each.line

    return find


def _mentions_of(*names: str) -> Callable[[Module], Iterator[int]]:
    """Finds names, attributes and imports, not comments or texts."""

    def find(module: Module) -> Iterator[int]:
        for node in module.nodes:
            match node:
                case ast.Name(id=found) | ast.Attribute(attr=found) if found in names:
                    yield node.lineno
                case ast.alias(name=found) if {*names} & {*found.split(".")}:
                    yield node.lineno
                case ast.ImportFrom(module=str(found)) if {*names} & {*found.split(".")}:
                    yield node.lineno

    return find


def _attributes_called(name: str) -> Callable[[Module], Iterator[int]]:
    def find(module: Module) -> Iterator[int]:
        for node in module.nodes:
            if isinstance(node, ast.Attribute) and node.attr == name:
                yield node.lineno

    return find


def _calls_of(name: str) -> Callable[[Module], Iterator[int]]:
    def find(module: Module) -> Iterator[int]:
        for node in module.nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
                yield node.lineno

    return find


def _replaced_cuda_functions(module: Module) -> Iterator[int]:
    """Finds assignments to attributes of torch or of torch.cuda."""
    for node in module.nodes:
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            if isinstance(target, ast.Attribute) and re.match(
                r"torch\.(cuda\.|Tensor\.|nn\.)?\w+$", ast.unparse(target)
            ):
                yield node.lineno


@dataclass(frozen=True)
class Confined:
    """Code that may only be in certain files."""

    what: str
    find: Callable[[Module], Iterator[int]]
    """Function that yields the lines of a module where it is."""
    allowed: str
    """Regular expression of the allowed files, from the root of the repository."""
    example: str
    """Program in which `find` finds it."""


CONFINED = (
    Confined(
        "megatron",
        _imports_of("megatron"),
        r"mtrain/core/(ranks|layers|engine|step)/.*|mtrain/data/formats/megatron_indexed\.py",
        "def f():\n    from megatron.core import tensor_parallel",
    ),
    Confined(
        # Everything else asks a ShardedModel, so a second data-parallel engine is a second class.
        "an attribute of megatron-core's data parallelism",
        _mentions_of(
            "DistributedDataParallel",
            "DistributedDataParallelConfig",
            "DistributedOptimizer",
            "bucket_groups",
            "finalize_model_grads",
            "gbuf_ranges",
            "grad_data",
            "main_grad",
            "zero_grad_buffer",
        ),
        # products that add weight gradients themselves have to know where
        r"mtrain/core/engine/sharded_(model|weights)\.py|mtrain/core/kernels\.py|tools/bench/.*",
        "def f(parameter):\n    return parameter.main_grad",
    ),
    Confined(
        "parallel_state",
        _mentions_of("parallel_state"),
        r"mtrain/core/ranks/groups\.py",
        "from megatron.core import parallel_state as ps",
    ),
    Confined(
        "a changed torch function",
        _replaced_cuda_functions,
        r"mtrain/core/ranks/cpu\.py",
        "torch.cuda.current_device = lambda: 0",
    ),
    Confined(
        "transformer_engine",
        _imports_of("transformer_engine"),
        r"mtrain/core/(ranks|layers)/.*",
        "import transformer_engine.pytorch as te",
    ),
    Confined(
        # A kind of attention is described in one place and built in one; the rest asks the parts of a layer.
        "model.mla",
        _attributes_called("mla"),
        r"mtrain/config/(schema/model|known_issues)\.py|mtrain/arch/features/mla\.py|mtrain/core/layers/layer_parts\.py"
        r"|mtrain/hf/schema/(config|families/deepseek)\.py|mtrain/verify/reference/model/latent_attention\.py",
        "rank = model.mla.kv_lora_rank",
    ),
    Confined(
        # A program's output: its verbs, launchers and the watchdog. All else writes through `logging`.
        "print",
        _calls_of("print"),
        r"mtrain/(__main__|cli/.*|launch/(local|torchrun)|watch/watchdog|base/log)\.py|tools/.*",
        'def f():\n    print("saved")',
    ),
    Confined(
        "transformers",
        _imports_of("transformers"),
        # the tower is a part of the model, and of its reference
        r"mtrain/(hf/.*|core/layers/vision\.py|verify/reference/model/images\.py)",
        "from transformers import AutoConfig",
    ),
)


@pytest.mark.parametrize("rule", CONFINED, ids=lambda rule: rule.what)
def test_what_is_confined_is_recognised(rule: Confined) -> None:
    assert list(rule.find(Module("mtrain.core.step.step", ROOT / "mtrain" / "step.py", ast.parse(rule.example))))


@pytest.mark.parametrize("rule", CONFINED, ids=lambda rule: rule.what)
def test_what_is_confined_stays_in_its_place(rule: Confined) -> None:
    wrong = [
        f"{path}:{line}: {rule.what}"
        for module in modules()
        if not re.fullmatch(rule.allowed, path := module.path.relative_to(ROOT).as_posix())
        for line in rule.find(module)
    ]
    assert wrong == []


def test_data_index_takes_the_datasets_of_megatron_only() -> None:
    (index,) = (module for module in modules() if module.name == "mtrain.data.formats.megatron_indexed")
    found = [each.target for each in imports(index) if each.target.startswith("megatron")]
    assert found
    assert [name for name in found if not name.startswith("megatron.core.datasets")] == []


REFERENCE = r"mtrain\.verify\.reference(\.\w+)*"
REFERENCE_MAY_IMPORT = rf"mtrain\.(config(\.\w+)*|base\.(errors|spelling)|hf\.tokenizer\.tokenizer)|{REFERENCE}"
"""Modules that the reference may import: the configuration as data, the tokenizer, words, and itself."""


def test_the_reference_shares_no_code_with_what_it_judges() -> None:
    assert not any(re.fullmatch(REFERENCE_MAY_IMPORT, f"mtrain.{name}") for name in ("lr", "loss.pair", "rope", "step"))
    found = [each.target for module in modules() if re.fullmatch(REFERENCE, module.name) for each in imports(module)]
    assert len(found) > 50
    assert [name for name in found if name.startswith("mtrain") and not re.fullmatch(REFERENCE_MAY_IMPORT, name)] == []


def test_the_lowest_layers_load_neither_torch_nor_megatron() -> None:
    names = [module.name for module in modules() if re.fullmatch(WITHOUT_TORCH, module.name)]
    program = f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\n"
    program += "print(*sorted({'torch', 'megatron', 'numpy', 'transformers'} & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


def python_files() -> list[Path]:
    return sorted(path for part in ("mtrain", "tools", "tests") for path in ROOT.glob(f"{part}/**/*.py"))


def test_files_are_short() -> None:
    wrong = [
        path
        for path in python_files()
        if (size := len(path.read_text().splitlines())) > MAX_FILE_LINES
        if size > MAX_TABLE_LINES or not re.fullmatch(TABLES, path.relative_to(ROOT).as_posix())
    ]
    assert wrong == []


def test_folders_show_what_they_hold() -> None:
    folders = {path.parent for path in python_files()}
    sizes = {str(each.relative_to(ROOT)): len(list(each.glob("*.py"))) for each in folders}
    assert {folder: size for folder, size in sizes.items() if size > MAX_FILES_IN_A_FOLDER} == {}


def test_class_names_are_distinct_within_a_package() -> None:
    places: dict[tuple[str, str], list[str]] = {}
    for module in modules():
        package = ".".join(module.name.split(".")[:2])
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                places.setdefault((package, node.name), []).append(module.name)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def functions(block: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yields the functions of a block of statements, at any depth; expressions hold none."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        inner = getattr(block, name, [])
        for each in inner if isinstance(inner, list) else []:
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                yield each
            yield from functions(each)


def test_functions_are_short() -> None:
    parsed = {module.path: module.tree for module in modules()}
    with uncollected():
        wrong = [
            f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {length} lines"
            for path in python_files()
            if (text := path.read_text()).count("\n") >= MAX_FUNCTION_LINES
            for node in functions(parsed[path] if path in parsed else ast.parse(text))
            if (length := (node.end_lineno or node.lineno) - node.lineno + 1) >= MAX_FUNCTION_LINES
        ]
    assert wrong == []
    deep = (
        "for x in y:\n  pass\nelse:\n  match x:\n    case 1:\n      try: pass\n      except E:\n        def f(): pass\n"
    )
    assert len(list(functions(ast.parse(f"{deep}      finally:\n        async def g(): pass")))) == 2


MAX_TAKING_CONFIG = 191
MANY_PARAMETERS = 7
MAX_WITH_MANY_PARAMETERS = 2
"""Numbers of functions that may take the whole configuration, and MANY_PARAMETERS or more; both should fall."""
MEGATRON_CALLS = {"CoreAttention", "FullWidthNormAttention", "LatentAttention", "LatentCore"}
"""Modules that Megatron-Core makes: it says what their `__init__` takes."""


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def takes_config(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    annotations = [each.annotation for each in parameters(function) if each.annotation is not None]
    return any(ast.unparse(each) in ("Config", "Config | None") for each in annotations)


def chooses_its_parameters(module: Module, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Says whether nobody else does: not the options of a command, autograd or Megatron-Core."""
    made = {
        each
        for node in module.nodes
        if isinstance(node, ast.ClassDef) and node.name in MEGATRON_CALLS
        for each in node.body
    }
    is_dictated = function.name == "forward" or (function.name == "__init__" and function in made)
    # flags of a command, and keys of loss.options
    return not is_dictated and not module.name.startswith(("mtrain.cli.", "mtrain.core.loss.functions."))


def functions_of_the_package() -> Iterator[tuple[Module, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for module in modules():
        if module.name.startswith("mtrain."):
            yield from ((module, each) for each in functions(module.tree))


def test_few_functions_take_the_whole_configuration() -> None:
    """A function that reads one section takes that section, or the value that it needs."""
    (section, whole) = functions(ast.parse("def f(train: TrainSection): pass\ndef g(x, *, config: Config): pass"))
    assert (takes_config(section), takes_config(whole)) == (False, True)
    found = [f"{module.name}.{each.name}" for module, each in functions_of_the_package() if takes_config(each)]
    assert 0 < len(found) <= MAX_TAKING_CONFIG, f"{len(found)} functions take Config: {found}"


def test_few_functions_have_many_parameters() -> None:
    """Values that go together are one value with a name of the field."""
    (many,) = functions(ast.parse("def f(self, a, b, c, /, d, *, e, f): pass"))
    assert len(parameters(many)) == MANY_PARAMETERS
    found = [
        f"{module.name}.{each.name}"
        for module, each in functions_of_the_package()
        if len(parameters(each)) >= MANY_PARAMETERS and chooses_its_parameters(module, each)
    ]
    assert 0 < len(found) <= MAX_WITH_MANY_PARAMETERS, f"{len(found)} functions have many parameters: {found}"


OPEN_SUBJECTS = {
    "mtrain.config.messages": "pydantic has a hundred types of errors, and more with each version",
    "mtrain.report.metrics.record": "any plain value stands as it is",
    "mtrain.verify.core.result": "any plain value stands as it is",
}
"""Modules whose `match` has values that no list of choices can name."""


def wildcards_that_mean_something(tree: ast.Module) -> list[int]:
    """Lists the lines of each `case _` that does more than say that nothing is left, which mypy then proves."""
    return [
        case.pattern.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Match)
        for case in node.cases
        if isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None and case.guard is None
        if not ast.unparse(case.body[0]).startswith("assert_never(")
    ]


def test_a_forgotten_choice_does_not_mean_another() -> None:
    found = {module.name: lines for module in modules() if (lines := wildcards_that_mean_something(module.tree))}
    assert found.keys() == OPEN_SUBJECTS.keys(), found
    choice = "match x:\n  case 1:\n    pass\n  case {0}:\n    {1}\n"
    assert wildcards_that_mean_something(ast.parse(choice.format("_", "f(x)"))) == [4]
    assert wildcards_that_mean_something(ast.parse(choice.format("other", "f(other)"))) == [4]
    assert wildcards_that_mean_something(ast.parse(choice.format("_", "assert_never(x)"))) == []


FORBIDDEN = {
    # Written so that this file does not contain them itself.
    "a path of one machine": r"(?<![\w.])/wor[k]/|/tmp/la[b]|/far[m]/",
    "a document outside the repository": r"\.\./share[d]|shared/desig[n]|(?<!docs/)desig[n]/\w+\.md",
    "a private word": r"\b(learn[t]|hindranc[e]s?|surrounding[s]|behol[d])\b",
    "a line number of another package": r"\w\.p[y]:\d+",
    "work left open": r"\bTOD[O]\b|\bFIXM[E]\b|\bXX[X]\b",
    "a swallowed error": r"excep[t]:|except (Base)?Exceptio[n]:\s*pass",
    "an escaped test": r"mark\.(ski[p]|xfai[l])|pytest\.(ski[p]|xfai[l])\(",
}
TEXT_SUFFIXES = {".py", ".sh", ".sbatch", ".md", ".yaml", ".toml", ""}


@cache
def texts() -> dict[Path, str]:
    """Returns the text of every file of the repository that people read."""
    parts = ("*", ".ci/*", "configs/**/*", "docs/**/*", "launch/**/*", "mtrain/**/*", "tests/**/*", "tools/**/*")
    paths = sorted(path for part in parts for path in ROOT.glob(part) if path.name != ".git")
    return {path: path.read_text(errors="replace") for path in paths if path.suffix in TEXT_SUFFIXES and path.is_file()}


@pytest.mark.parametrize(("what", "pattern"), FORBIDDEN.items(), ids=FORBIDDEN.keys())
def test_nothing_holds(what: str, pattern: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {what}: {line.strip()[:80]}"
        for path, text in texts().items()
        if re.search(pattern, text)
        for number, line in enumerate(text.splitlines(), start=1)
        if re.search(pattern, line)
    ]
    assert wrong == []
