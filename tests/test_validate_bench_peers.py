"""The peers' bench: which rows a peer is asked, what it answers through its own process, and what is said where it cannot.

The peers here are stand-ins with the modules and calls of the real ones; their numbers are the tests'.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from flashsim.validate.bench_peers import PEERS, PUBLISHED, Answer, ask_peer, comparable, main, summary

HEAD = "gpu,kernel,pass,dtype,batch,heads_q,seqlen_q,head_dim,causal,variant,ms"
ROWS = (
    "h100,fa3,fwd,fp16,1,8,512,64,1,,0.02",
    "a100-40gb,standard,fwd,fp16,1,8,256,64,0,,0.1",
    "h100,fa3,fwd,fp16,1,8,512,64,0,,0.02",  # no causal mask: PipeWeave has none
    "h100,fa3,fwd,fp8,1,8,512,64,1,,0.02",
    "h100,fa3,fwd,fp16,1,8,512,64,1,pingpong=false,0.02",
    "b200,fa4,fwd,bf16,1,8,512,128,1,,0.02",
)
PIPEWEAVE, LLMCOMPASS = PEERS


def file_of(folder: Path, *rows: str) -> Path:
    path = folder / "rows.csv"
    path.write_text("\n".join((HEAD, *rows)) + "\n")
    return path


def pipeweave_in(folder: Path, body: str = "return features[1] / 100") -> Path:
    """Half of a microsecond a query row, and words on stdout that are no answer."""
    code = f"""
        print("loading")
        class DurationPredictor:
            def __init__(self, chip, *, model_dir, dataset_dir, hardware_dir):
                self.chip = chip
            def generate_attn_features(self, bs, q, kv, nh, nkv, hd, kind):
                assert (len(q), len(kv), kind) == (bs, bs, "fa3_ragged") and self.chip == "H100"
                return [0.0, float(sum(q))]
            def predict_operator_duration(self, operator, features, cycles):
                print("predicting")
                {body}
    """
    folder.mkdir()
    (folder / "aggregator.py").write_text(textwrap.dedent(code))
    return folder


def llmcompass_in(folder: Path) -> Path:
    """A second a product for each of its GB/s, whatever is multiplied."""
    tensor = """
        class Tensor:
            def __init__(self, shape):
                self.shape = shape
        data_type_dict = {"fp16": 2}
    """
    operator = """
        class {name}:
            def __init__(self, data_type): pass
            def __call__(self, *tensors): self.sizes = [t.shape for t in tensors]
            def compile_and_simulate(self, chip, compile_mode):
                assert all(size > 0 for shape in self.sizes for size in shape)
                return 1e9 / chip.io_module.bandwidth
    """
    device = """
        from types import SimpleNamespace as N
        chip = N(io_module=N(bandwidth=1.0), compute_module=N(overhead=N(matmul=1e-3, softmax=2e-3)))
        device_dict = {"A100_80GB_fp16": chip}
    """
    files = {
        "software_model/utils.py": tensor, "software_model/matmul.py": operator.format(name="BatchedMatmul"),
        "software_model/softmax.py": operator.format(name="Softmax"), "hardware_model/device.py": device,
    }  # fmt: skip
    for name, code in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(code))
    return folder


def test_rows_go_to_the_peer_that_models_them(tmp_path: Path) -> None:
    rows = comparable(file_of(tmp_path, *ROWS))
    assert [row.peer.name for row in rows] == ["pipeweave", "llmcompass"]
    assert [row.ms for row in rows] == [0.02, 0.1]
    published = comparable(PUBLISHED)
    assert {row.peer.name for row in published} == {"pipeweave", "llmcompass"}
    assert len(published) == 15


def test_a_peer_answers_through_its_own_process(tmp_path: Path) -> None:
    case = comparable(file_of(tmp_path, *ROWS))[0].case
    ready, (answer, again) = ask_peer(PIPEWEAVE, pipeweave_in(tmp_path / "p"), sys.executable, [case, case], 60)
    assert answer.ms == again.ms == 5.12
    assert ready > 0
    assert answer.seconds > 0
    assert answer.reason == ""


def test_llmcompass_gets_the_chips_bandwidth_and_its_own_overheads(tmp_path: Path) -> None:
    case = comparable(file_of(tmp_path, *ROWS))[1].case
    _, (answer,) = ask_peer(LLMCOMPASS, llmcompass_in(tmp_path / "l"), sys.executable, [case], 60)
    assert answer.ms == pytest.approx(1e3 * (2 * 1e-3 + 2e-3 + 3e9 / 1.555e12))


def test_a_row_that_a_peer_cannot_answer_carries_its_reason(tmp_path: Path) -> None:
    case = comparable(file_of(tmp_path, *ROWS))[0].case
    _, (answer,) = ask_peer(PIPEWEAVE, pipeweave_in(tmp_path / "p", "raise KeyError('x')"), sys.executable, [case], 60)
    assert answer.reason == "KeyError: 'x'"


def test_a_peer_that_takes_too_long_keeps_what_it_answered(tmp_path: Path) -> None:
    rows = comparable(file_of(tmp_path, ROWS[0], ROWS[0].replace("512", "600")))
    slow = "import time; time.sleep(1e4 * (cycles > 512)); return 1.0"
    _, (first, second) = ask_peer(PIPEWEAVE, pipeweave_in(tmp_path / "p", slow), sys.executable, [row.case for row in rows], 8)
    assert first.ms == 1.0
    assert second.reason == "not asked in the time given: raise --seconds"


def test_the_bench_prints_both_and_sums_them_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(file_of(tmp_path, *ROWS))
    given = ["--pipeweave", str(pipeweave_in(tmp_path / "p")), "--llmcompass", str(llmcompass_in(tmp_path / "l"))]
    assert main([file, *given]) == 0
    out, err = capsys.readouterr()
    assert "h100 fa3" in out
    assert "5.12 │ +25500.0 %" in out
    assert out.count("PipeWeave") == 4  # loaded, its row, and two lines of the summary
    assert "not asked" not in err


def test_absent_peers_are_a_sentence_and_flashsims_rows_are_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(file_of(tmp_path, *ROWS))
    assert main([file]) == 0
    out, err = capsys.readouterr()
    assert "LLMCompass is not asked: clone PrincetonUniversity/LLMCompass and give its folder by --llmcompass" in err
    assert out.count("h100 fa3") == 1
    assert main([file, "--pipeweave", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert f"bench_peers: {tmp_path} is not PipeWeave: it has no aggregator.py; clone zksainx/pipeweave and give its" in err
    assert out.count("h100 fa3") == 1


def test_a_peer_that_does_not_start_is_a_sentence(tmp_path: Path) -> None:
    case, folder = comparable(file_of(tmp_path, *ROWS))[0].case, tmp_path / "p"
    folder.mkdir()
    (folder / "aggregator.py").write_text("import a_module_that_is_not_there")
    with pytest.raises(ValueError, match=r"^PipeWeave does not start with .*: ModuleNotFoundError: No module named 'a_module"):
        ask_peer(PIPEWEAVE, folder, sys.executable, [case], 60)
    with pytest.raises(ValueError, match=r"^--peer-python .*nothing cannot be run: no such file or directory$"):
        ask_peer(PIPEWEAVE, folder, str(tmp_path / "nothing"), [case], 60)


@pytest.mark.parametrize("rows", [(), ROWS[2:]])
def test_a_file_without_such_rows_is_a_sentence(
    tmp_path: Path, rows: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(file_of(tmp_path, *rows))]) == 2
    assert capsys.readouterr().err.startswith("bench_peers: ")
    assert main([str(tmp_path / "absent.csv")]) == 2


def test_a_summary_is_of_errors_with_their_sign() -> None:
    pairs = [(Answer(ms=0.9, seconds=1), 1.0), (Answer(ms=1.3, seconds=3), 1.0), (Answer(reason="no"), 1.0)]
    assert summary(pairs) == ("2", "20.0 %", "+30.0 %", "2 s")
    assert summary([]) == ("0", "-", "-", "-")
