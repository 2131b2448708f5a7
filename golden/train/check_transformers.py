"""An independent reading of the shipped weights: Hugging Face transformers against the model of this folder.

    python golden/train/check_transformers.py [BUNDLE]

Needs transformers 5. Loads the bundle, dequantised to float32, into DeepseekV3ForCausalLM; prints the largest
difference of logits, bits per byte of held-out text through both, and greedy text.
"""

import json
import math
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

import quantize  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from export import BUNDLE, to_torch  # noqa: E402
from model import Transformer, load_named_tensors  # noqa: E402
from recipe import Architecture  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from transformers import DeepseekV3ForCausalLM  # noqa: E402

from kdtree_nb.bundle import Bundle  # noqa: E402


def load_both(path: Path) -> tuple[Transformer, DeepseekV3ForCausalLM]:
    bundle = Bundle.open(path)
    tensors = quantize.float_tensors({name: to_torch(bundle[name]) for name in bundle})
    ours = Transformer(Architecture()).eval()
    load_named_tensors(ours, tensors)
    with tempfile.TemporaryDirectory() as folder:
        named = {n if n.endswith("bias") else f"{n}.weight": t.contiguous() for n, t in tensors.items()}
        save_file(named, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        (Path(folder) / "config.json").write_text(json.dumps(bundle.config.to_hf()))
        theirs = DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return ours, theirs


@torch.no_grad()
def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE.parent / "kdt16m" / BUNDLE
    tokenizer = Tokenizer.from_file(str(path.with_name("tokenizer.json")))
    ours, theirs = load_both(path)
    for sample in sorted(path.with_name("heldout").glob("*.txt")):
        ids = torch.tensor([tokenizer.encode(sample.read_text(encoding="utf-8")).ids[:2048]]).view(4, 512)
        size = sum(len(tokenizer.decode(row.tolist()).encode()) for row in ids[:, 1:])
        a, b = ours(ids), theirs(ids).logits
        bits = [F.cross_entropy(x[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum") for x in (a, b)]
        ours_bits, their_bits = (x.item() / math.log(2) / size for x in bits)
        print(f"{sample.stem:12s} largest logit difference {(a - b).abs().max():.2e}, logits' deviation {a.std():.2f}, "
              f"argmax equal {(a.argmax(-1) == b.argmax(-1)).float().mean():.2%}, "
              f"bits per byte {ours_bits:.6f} and {their_bits:.6f}", flush=True)  # fmt: skip
    prompts = json.loads(path.with_name("prompts.json").read_text(encoding="utf-8"))
    for prompt in prompts[:5]:
        ids = torch.tensor([tokenizer.encode(prompt["text"]).ids])
        text = tokenizer.decode(theirs.generate(ids, max_new_tokens=96, do_sample=False)[0, ids.shape[1] :].tolist())
        print(f"\n--- {prompt['domain']}: {prompt['text'][-160:]!r}\n{text}")


if __name__ == "__main__":
    main()
