"""A passage of text coloured by the expert that each token goes to, as one HTML page.

The page stands alone: style, script and numbers are inside, nothing is fetched (a content security
policy forbids it), and it works without a network, with a keyboard, and in light and dark. Text
from the data set reaches it only HTML-escaped; the numbers are JSON that no markup can leave.

Axis legend: L mixture-of-experts layers, n tokens, K slots per token, E experts.
"""

import base64
import colorsys
import hashlib
import html
import json
import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np

# Okabe and Ito's colours, told apart under the common forms of colour blindness.
_FEW_COLOURS = (
    "#e69f00",
    "#56b4e9",
    "#009e73",
    "#f0e442",
    "#0072b2",
    "#d55e00",
    "#cc79a7",
    "#999999",
)


def token_map_html(
    tokens: Sequence[bytes],
    expert: Any,
    gate: Any,
    num_experts: int,
    *,
    title: str,
    note: str = "",
    layers: Sequence[Any] | None = None,
) -> str:
    """An HTML page of a passage whose tokens are coloured by their first-choice expert.

    It has a layer selector, each token's experts and gates on hover or focus, a legend with each
    expert's share of the first choices, and a click on an expert leaves only its tokens coloured.

    A character whose bytes lie in several tokens is shown in the first of them, and a dot stands
    for each of the others. Bytes that are no UTF-8 are shown as U+FFFD; characters that would not
    show or would reorder the page (control, bidirectional, private use) by their code point.

    Args:
      tokens: the n tokens' bytes, in order.
      expert: int[L, n, K], best first; num_experts marks an empty slot.
      gate: float[L, n, K].
      num_experts: E.
      title: heading of the page.
      note: a sentence under the heading, such as the checkpoint and where the passage is from.
      layers: L labels of the layers; their indices by default.

    Raises:
      ValueError: no tokens, tokens that are not bytes, shapes that do not fit, an expert outside
        0..E, a gate that is not finite.
    """
    expert, gate = np.asarray(expert), np.asarray(gate, float)
    _check(tokens, expert, gate, num_experts)
    names = [str(label) for label in (range(len(expert)) if layers is None else layers)]
    if len(names) != len(expert):
        raise ValueError(f"layers: got {len(names)} labels; allowed: {len(expert)}, as in expert")

    first = expert[:, :, 0]
    shares = np.stack([np.bincount(row, minlength=num_experts + 1) for row in first]) / len(tokens)
    data = {
        "numExperts": num_experts,
        "choices": expert.shape[2],
        "layers": names,
        "expert": expert.reshape(len(expert), -1).tolist(),
        "gate": np.round(gate, 4).reshape(len(gate), -1).tolist(),
        "share": np.round(shares, 5).tolist(),
    }
    spans = [
        f'<span class="t e{chosen}{" empty" if chosen == num_experts else ""}" data-e="{chosen}" '
        f'data-label="{html.escape(label)}" '
        f'role="button" tabindex="-1">{html.escape(text)}</span>'
        for (text, label), chosen in zip(_show(tokens), first[0], strict=True)
    ]
    legend = [
        f'<li><button type="button" aria-pressed="false" data-expert="{i}">'
        f'<span class="swatch e{i}">{i}</span><span class="bar"><span class="fill"></span></span>'
        f'<span class="share">{100 * shares[0, i]:.1f} %</span></button></li>'
        for i in range(num_experts)
    ]
    style = _STYLE + "\n".join(_expert_rules(num_experts)) + "\n"
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(_SCRIPT)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    values = {
        "@POLICY@": policy,
        "@TITLE@": html.escape(title),
        "@NOTE@": html.escape(note),
        "@STYLE@": style,
        "@LAST_LAYER@": str(len(expert) - 1),
        "@FIRST_NAME@": html.escape(names[0]),
        "@UNIFORM@": f"{100 / num_experts:.3g} %",
        "@TOKENS@": "".join(spans),
        "@LEGEND@": "\n".join(legend),
        # Inside <script> only "<" could end it; the others keep the file safe to paste elsewhere.
        "@DATA@": json.dumps(data, separators=(",", ":"))
        .replace("<", "\\u003c")
        .replace(">", "\\u003e")
        .replace("&", "\\u0026"),
        "@SCRIPT@": _SCRIPT,
    }
    return _fill(_PAGE, values)


def _check(tokens, expert, gate, num_experts):
    if len(tokens) == 0:
        raise ValueError("tokens: got none; allowed: at least one")
    for i, token in enumerate(tokens):
        if not isinstance(token, bytes):
            raise ValueError(f"tokens[{i}]: got {type(token).__name__}; allowed: bytes")
    if expert.ndim != 3 or 0 in expert.shape or expert.shape[1] != len(tokens):
        raise ValueError(
            f"expert: got shape {expert.shape}; allowed: [L, {len(tokens)}, K], as many as tokens"
        )
    if gate.shape != expert.shape:
        raise ValueError(f"gate: got shape {gate.shape}; allowed: {expert.shape}, as expert")
    if not np.issubdtype(expert.dtype, np.integer):
        raise ValueError(f"expert: got dtype {expert.dtype}; allowed: integers")
    if expert.min() < 0 or expert.max() > num_experts:
        raise ValueError(
            f"expert: got {expert.min()}..{expert.max()}; allowed: 0..{num_experts} (num_experts "
            "marks an empty slot)"
        )
    if not np.isfinite(gate).all():
        raise ValueError("gate: got a value that is not finite; allowed: finite gates")


def _fill(page, values):
    """Replaces each @NAME@ once, in one pass, so that no value is itself searched for names."""
    parts = page.split("@")
    return "".join(values[f"@{part}@"] if i % 2 else part for i, part in enumerate(parts))


def _digest(text):
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _show(tokens):
    """Yields for each token the text to show and a label that names its bytes."""
    begins = {}  # byte offset -> the character that begins there
    owner = {}  # byte offset -> the offset at which its character begins
    for offset, character, length in _characters(b"".join(tokens)):
        begins[offset] = character
        owner.update(dict.fromkeys(range(offset, offset + length), offset))
    start = 0
    for token in tokens:
        stop = start + len(token)
        found = [begins[offset] for offset in range(start, stop) if offset in begins]
        raw = token.hex(" ") if len(token) <= 24 else f"{token[:24].hex(' ')} …"
        if not token:
            yield "◇", "a token without bytes"
        elif not found:
            character = _visible(begins[owner[start]])
            yield "·", f"{raw}, the rest of “{character.strip()}”"
        else:
            text = "".join(_visible(character) for character in found)
            if unicodedata.category(found[0]).startswith("M"):
                text = "◌" + text  # else it would combine with the token before
            yield text, f"“{text.rstrip(chr(10))}” {raw}"
        start = stop


def _characters(data):
    """Yields (offset, character, number of bytes); a byte that is no UTF-8 gives U+FFFD."""
    offset = 0
    while offset < len(data):
        for length in range(1, 5):
            try:
                character = data[offset : offset + length].decode("utf-8")
                break
            except UnicodeDecodeError:
                continue
        else:
            character, length = "\ufffd", 1
        yield offset, character, length
        offset += length


def _visible(character):
    if character == "\n":
        return "⏎\n"
    if character == "\t":
        return "⇥"
    code = ord(character)
    if code < 32:
        return chr(0x2400 + code)  # Unicode's pictures of the control characters
    if unicodedata.category(character) in ("Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"):
        return f"[U+{code:04X}]"
    return character


def _expert_rules(num_experts):
    """CSS of each expert: its colour, and black or white on it, whichever is read better."""
    for i in range(num_experts):
        if num_experts <= len(_FEW_COLOURS):
            colour = _FEW_COLOURS[i]
        else:
            # Neighbours a golden angle apart in hue; lightness tells apart what hue cannot.
            rgb = colorsys.hls_to_rgb(i * 0.618034 % 1, (0.74, 0.56, 0.84, 0.4)[i % 4], 0.62)
            colour = "#" + "".join(f"{round(255 * channel):02x}" for channel in rgb)
        ink = "#000" if _luminance(colour) > 0.179 else "#fff"
        yield f".e{i} {{ --fill: {colour}; --ink: {ink}; }}"


def _luminance(colour):
    """Relative luminance of "#rrggbb" (WCAG 2); black and white contrast alike at 0.179."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


_STYLE = """
:root {
  color-scheme: light dark;
  --page: #fff; --text: #1b1b1b; --soft: #595959; --line: #d4d4d4; --panel: #f5f5f5;
  --focus: #0b57d0;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #151515; --text: #ececec; --soft: #ababab; --line: #444; --panel: #222;
    --focus: #8ab4f8;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 1.5rem 1.25rem 4rem; max-width: 76rem;
  background: var(--page); color: var(--text);
  font: 1rem/1.5 system-ui, sans-serif;
}
h1 { font-size: 1.35rem; margin: 0 0 .25rem; }
h2 { font-size: .95rem; margin: 0 0 .25rem; }
p { margin: 0 0 .5rem; }
.soft { color: var(--soft); font-size: .88rem; }
.controls {
  position: sticky; top: 0; z-index: 1; display: flex; flex-wrap: wrap; gap: .25rem 1.5rem;
  align-items: center; padding: .6rem 0; margin-bottom: .8rem;
  background: var(--page); border-bottom: 1px solid var(--line);
}
.controls label { display: flex; align-items: center; gap: .5rem; }
.controls input[type=range] { width: min(16rem, 40vw); accent-color: var(--focus); }
.controls output { font-weight: 600; min-width: 2.5ch; }
.columns { display: grid; grid-template-columns: minmax(0, 1fr) 15rem; gap: 2rem; }
@media (max-width: 46rem) { .columns { grid-template-columns: minmax(0, 1fr); } }
#passage {
  font: 1rem/2 ui-monospace, "DejaVu Sans Mono", monospace;
  white-space: break-spaces; overflow-wrap: anywhere;
}
.t {
  background: var(--fill, transparent); color: var(--ink, inherit); cursor: pointer;
  padding: .15em 0; border-radius: 2px; box-shadow: inset 1px 0 0 var(--page);
}
.t.empty { outline: 1px dashed var(--soft); outline-offset: -1px; }
.t.dim { background: transparent; color: var(--soft); }
.t.later { background: transparent; color: inherit; box-shadow: inset 0 -3px 0 var(--pick); }
.t:hover { outline: 2px solid var(--text); }
.numbers .t::before { content: attr(data-e); font-size: .6em; vertical-align: super; }
.numbers .t.empty::before { content: "-"; }
:focus-visible { outline: 3px solid var(--focus); outline-offset: 1px; }
#legend { list-style: none; margin: 0; padding: 0; }
#legend button {
  display: grid; grid-template-columns: 2.2rem 1fr 3.9rem; align-items: center; gap: .5rem;
  width: 100%; padding: .12rem .3rem; border: 1px solid transparent; border-radius: 4px;
  background: none; color: inherit; font: inherit; font-size: .88rem; cursor: pointer;
}
#legend button:hover { background: var(--panel); }
#legend button[aria-pressed=true] { background: var(--panel); border-color: var(--text); }
.swatch { background: var(--fill); color: var(--ink); border-radius: 2px; text-align: center; }
.bar { height: .5rem; background: var(--panel); }
.fill { display: block; height: 100%; width: 0; background: var(--soft); }
.share { text-align: right; font-variant-numeric: tabular-nums; }
#tip {
  position: absolute; z-index: 2; max-width: 22rem; padding: .5rem .7rem; border-radius: 6px;
  background: var(--text); color: var(--page); font-size: .85rem; line-height: 1.4;
  white-space: pre-line; overflow-wrap: anywhere; pointer-events: none;
}
#tip[hidden] { display: none; }
"""

_SCRIPT = """
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const tokens = [...document.querySelectorAll(".t")];
const buttons = [...document.querySelectorAll("#legend button")];
const passage = document.getElementById("passage");
const slider = document.getElementById("layer");
const status = document.getElementById("status");
const tip = document.getElementById("tip");
const percent = (share) => (100 * share).toFixed(1) + " %";
let layer = 0;
let picked = null;
let current = 0;

const choices = (i) => {
  const start = i * data.choices;
  return data.expert[layer].slice(start, start + data.choices);
};

function draw() {
  tokens.forEach((token, i) => {
    const experts = choices(i);
    const rank = picked === null ? 0 : experts.indexOf(picked);
    const classes = ["t", "e" + experts[0]];
    if (experts[0] === data.numExperts) classes.push("empty");
    if (rank > 0) classes.push("later");
    if (rank < 0) classes.push("dim");
    token.className = classes.join(" ");
    token.dataset.e = experts[0];
  });
  const shares = data.share[layer];
  const largest = Math.max(...shares.slice(0, data.numExperts), 1e-9);
  buttons.forEach((button, i) => {
    button.setAttribute("aria-pressed", String(i === picked));
    button.querySelector(".share").textContent = percent(shares[i]);
    button.querySelector(".fill").style.width = 100 * shares[i] / largest + "%";
  });
  document.getElementById("layer-name").textContent = data.layers[layer];
  slider.setAttribute("aria-valuetext", "layer " + data.layers[layer]);
  const unrouted = shares[data.numExperts];
  let line = "Layer " + data.layers[layer] + ", " + tokens.length + " tokens";
  if (unrouted > 0) line += ", " + percent(unrouted) + " not routed (dashed)";
  if (picked !== null) {
    const later = tokens.filter((_, i) => choices(i).indexOf(picked) > 0).length;
    const first = tokens.filter((_, i) => choices(i)[0] === picked).length;
    line += ". Expert " + picked + ": first choice of " + first;
    if (data.choices > 1) line += ", a later choice of " + later + " (underlined)";
    line += ". Escape shows all";
  }
  status.textContent = line + ".";
  if (!tip.hidden) explain(current);
}

function explain(i) {
  const start = i * data.choices;
  const lines = [tokens[i].dataset.label, "token " + i + ", layer " + data.layers[layer]];
  choices(i).forEach((expert, slot) => {
    const gate = data.gate[layer][start + slot].toFixed(3);
    lines.push(expert === data.numExperts ? "empty slot" : "expert " + expert + ", gate " + gate);
  });
  tip.textContent = lines.join("\\n");
  tip.hidden = false;
  const box = tokens[i].getClientRects()[0] || tokens[i].getBoundingClientRect();
  const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
  const below = box.bottom + tip.offsetHeight + 10 < window.innerHeight;
  const top = below ? box.bottom + 6 : box.top - tip.offsetHeight - 6;
  tip.style.left = window.scrollX + Math.max(8, Math.min(box.left, room)) + "px";
  tip.style.top = window.scrollY + top + "px";
}

function pick(expert) {
  picked = expert === picked || expert === data.numExperts ? null : expert;
  if (picked !== null) passage.style.setProperty("--pick", colourOf(picked));
  draw();
}

const colourOf = (expert) =>
  getComputedStyle(buttons[expert].querySelector(".swatch")).backgroundColor;

function visit(i) {
  tokens[current].tabIndex = -1;
  tokens[current].removeAttribute("aria-describedby");
  current = Math.max(0, Math.min(tokens.length - 1, i));
  tokens[current].tabIndex = 0;
  tokens[current].setAttribute("aria-describedby", "tip");
}

const indexOf = (event) => tokens.indexOf(event.target.closest(".t"));
passage.addEventListener("mouseover", (event) => {
  const i = indexOf(event);
  if (i >= 0) { visit(i); explain(i); }
});
passage.addEventListener("mouseleave", () => { tip.hidden = true; });
passage.addEventListener("focusin", (event) => {
  const i = indexOf(event);
  if (i >= 0) { visit(i); explain(i); }
});
passage.addEventListener("focusout", () => { tip.hidden = true; });
passage.addEventListener("click", (event) => {
  const i = indexOf(event);
  if (i >= 0) pick(choices(i)[0]);
});
passage.addEventListener("keydown", (event) => {
  const i = indexOf(event);
  const moves = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: tokens.length - 1 };
  if (event.key in moves) {
    visit(moves[event.key]);
    tokens[current].focus();
  } else if (event.key === "Enter" || event.key === " ") {
    pick(choices(i)[0]);
  } else {
    return;
  }
  event.preventDefault();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  tip.hidden = true;
  if (picked !== null) pick(picked);
});
buttons.forEach((button, i) => button.addEventListener("click", () => pick(i)));
slider.addEventListener("input", () => { layer = Number(slider.value); draw(); });
document.getElementById("numbers").addEventListener("change", (event) => {
  passage.classList.toggle("numbers", event.target.checked);
});
visit(0);
draw();
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="@POLICY@">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>@TITLE@</title>
<style>@STYLE@</style>
</head>
<body>
<h1>@TITLE@</h1>
<p class="soft">@NOTE@</p>
<div class="controls">
<label>Layer <input id="layer" type="range" min="0" max="@LAST_LAYER@" value="0" step="1"
 autocomplete="off"><output id="layer-name" for="layer">@FIRST_NAME@</output></label>
<label><input id="numbers" type="checkbox" autocomplete="off"> expert numbers</label>
<span id="status" role="status" class="soft"></span>
</div>
<div class="columns">
<main>
<div id="passage" role="group"
 aria-label="Passage; arrow keys move from token to token">@TOKENS@</div>
</main>
<section aria-labelledby="legend-title">
<h2 id="legend-title">First choices by expert</h2>
<p class="soft">Uniform: @UNIFORM@. Click one to see its tokens.</p>
<ul id="legend">
@LEGEND@
</ul>
</section>
</div>
<div id="tip" role="tooltip" hidden></div>
<script type="application/json" id="data">@DATA@</script>
<script>@SCRIPT@</script>
</body>
</html>
"""
