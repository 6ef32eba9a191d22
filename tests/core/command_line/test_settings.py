"""Options by variables and by the file of `--config`: what goes before what, and what is refused."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from fedplat.command_line import settings


class Command(settings.ConfiguredCommand, click.Command):
    error_class = click.BadParameter


def use_file(context: click.Context, _: click.Parameter, value: Path | None) -> None:
    try:
        settings.use_file(context, value)
    except ValueError as exc:
        raise click.BadParameter(str(exc)) from exc


@click.command(cls=Command)
@click.option("--config", type=click.Path(path_type=Path), is_eager=True, expose_value=False, callback=use_file)
@click.option("--log-level", default="info")
@click.option("--label", "labels", multiple=True)
@click.option("--number", type=click.IntRange(1, 9), default=1)
@click.option("--part", type=float, default=0.5)
@click.option("--mtls/--no-mtls", default=False)
@click.option("--traces", envvar=["OTEL_TRACES"])
@click.option("--ticket")
@click.option("--proxy", envvar="FEDPLAT_PROXY")
@click.option("--yes", is_flag=True, default=None)
def show(**options: object) -> None:
    """Print the options."""
    click.echo(" ".join(f"{name}={value}" for name, value in sorted(options.items()) if value is not None))


def run(*arguments: str, **variables: str) -> str:
    result = CliRunner().invoke(show, [*arguments], env=variables)
    assert result.exit_code in (0, 2), result.output
    assert result.exit_code == 0 or result.stderr.startswith("Usage:")
    return result.output.partition("Error: ")[2] if result.exit_code else result.output


def write(folder: Path, text: str, mode: int = 0o644) -> str:
    path = folder / "options.toml"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_an_option_goes_before_its_variable_and_that_before_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, 'log-level = "error"\nnumber = 2\npart = 1\nmtls = true\nlabel = ["a=1", "b = 2"]\n')
    found = "log_level=error mtls=True number=2 part=1.0\n"
    assert run("--config", file) == f"labels=('a=1', 'b = 2') {found}"
    assert run(FEDPLAT_CONFIG=file, FEDPLAT_NUMBER="3", FEDPLAT_LABEL="c=3 'd=4 5'") == (
        f"labels=('c=3', 'd=4 5') {found}".replace("number=2", "number=3")
    )
    assert run("--number", "4", "--no-mtls", "--label", "e=5", FEDPLAT_CONFIG=file, FEDPLAT_NUMBER="3") == (
        "labels=('e=5',) log_level=error mtls=False number=4 part=1.0\n"
    )


def test_a_variable_does_not_agree_to_what_a_command_asks() -> None:
    assert "yes" not in run(FEDPLAT_YES="1")
    assert "yes=True" in run("--yes")


def test_variables_have_the_names_of_options_and_further_ones_that_they_name() -> None:
    assert [settings.list_variables(option) for option in settings.list_options(show)][1:] == [
        *(["FEDPLAT_LOG_LEVEL"], ["FEDPLAT_LABEL"], ["FEDPLAT_NUMBER"], ["FEDPLAT_PART"], ["FEDPLAT_MTLS"]),
        *(["FEDPLAT_TRACES", "OTEL_TRACES"], ["FEDPLAT_TICKET"], ["FEDPLAT_PROXY"]),
    ]
    assert "traces=a" in run(FEDPLAT_TRACES="a", OTEL_TRACES="b")
    assert "traces=b" in run(OTEL_TRACES="b")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("log_level = 'x'", "unknown key log_level; did you mean log-level?"),
        ("zebra = 1", "unknown key zebra; expected the long name of an option, such as log-level"),
        ("config = 'x'", "unknown key config; expected the long name of an option, such as log-level"),
        ("log-level = 5", "log-level = 5: expected a text in quotes"),
        ("number = '5'", "number = '5': expected a whole number"),
        ("number = true", "number = true: expected a whole number"),
        ("part = 'x'", "part = 'x': expected a number"),
        ("mtls = 'yes'", "mtls = 'yes': expected true or false"),
        ("label = 'a=1'", "label = 'a=1': expected a list of texts, such as label = ['...']"),
        ("label = [1]", "label = […]: expected a list of texts, such as label = ['...']"),
        ("a =", "it is not TOML: Invalid value (at end of document)"),
        ("#" + "a" * settings.MAX_BYTES, "it is larger than 1 MiB; expected a few options"),
    ],
)
def test_a_wrong_file_gives_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    file = write(tmp_path, text)
    assert run("--config", file) == f"Invalid value for '--config': {file}: {said}\n".replace(
        "'--config'", "'--config' (env var: 'FEDPLAT_CONFIG')"
    )


def test_a_value_out_of_range_names_where_it_comes_from(tmp_path: Path) -> None:
    file = write(tmp_path, "number = 10")
    sentence = "Invalid value for '--number' (env var: 'FEDPLAT_NUMBER'): 10 is not in the range 1<=x<=9"
    assert run("--config", file) == f"{sentence} (from {file})\n"
    assert run(FEDPLAT_NUMBER="10") == f"{sentence} (from FEDPLAT_NUMBER)\n"
    assert run("--number", "10") == f"{sentence}.\n"
    assert "No closing quotation; expected words, quoted as in a shell" in run(FEDPLAT_LABEL="'a")


def test_a_file_of_others_is_refused_and_one_with_secrets_is_private(tmp_path: Path) -> None:
    assert "another user can write it" in run("--config", write(tmp_path, "number = 2", 0o666))
    assert "it cannot be read: No such file or directory" in run("--config", str(tmp_path / "absent"))
    for text in ("ticket = 'fpt1.x'", "proxy = 'http://user:secret@proxy:3128'"):
        said = run("--config", write(tmp_path, text, 0o644))
        assert "and all users of this host can read it; chmod 600" in said
        assert "secret@" not in said
        assert "number=1" in run("--config", write(tmp_path, text, 0o640))
    assert "proxy=http://proxy:3128" in run("--config", write(tmp_path, "proxy = 'http://proxy:3128'", 0o644))
