"""The page shows what it was given, stands alone, and nothing in the text becomes markup."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from moe_jax.analysis import token_map
from moe_jax.analysis.token_map import token_map_html


class Page(HTMLParser):
    """Collects the tokens' spans, the scripts, the tags and every attribute."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.spans, self.scripts, self.styles = [], [], [], [], []
        self.policy = self.title = None
        self._inside = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append(tag)
        self.attributes.extend((tag, *pair) for pair in attributes.items())
        self._inside = tag
        if tag == "span" and (attributes.get("class") or "").split(" ")[0] == "t":
            self.spans.append([attributes, ""])
            self._inside = "token"
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy":
            self.policy = attributes["content"]

    def handle_endtag(self, tag):
        self._inside = None

    def handle_data(self, data):
        if self._inside == "token":
            self.spans[-1][1] += data
        elif self._inside == "script":
            self.scripts.append(data)
        elif self._inside == "style":
            self.styles.append(data)
        elif self._inside == "title":
            self.title = data

    @property
    def texts(self):
        return [text for _, text in self.spans]

    @property
    def labels(self):
        return [attributes["data-label"] for attributes, _ in self.spans]

    @property
    def data(self):
        return json.loads(self.scripts[0])


def make(tokens, num_layers=2, k=2, num_experts=4, **more):
    rng = np.random.default_rng(0)
    expert = rng.integers(0, num_experts + 1, (num_layers, len(tokens), k))
    gate = rng.uniform(size=expert.shape)
    more.setdefault("title", "A title")
    text = token_map_html(tokens, expert, gate, num_experts, **more)
    return Page(text), expert, gate


def test_numbers_reach_the_page():
    tokens = [b"We", b" the", b" People"]
    page, expert, gate = make(tokens, layers=["first", "last"])
    assert page.texts == ["We", " the", " People"]
    assert page.labels == ["“We” 57 65", "“ the” 20 74 68 65", "“ People” 20 50 65 6f 70 6c 65"]
    data = page.data
    assert (data["numExperts"], data["choices"], data["layers"]) == (4, 2, ["first", "last"])
    assert np.array_equal(np.reshape(data["expert"], expert.shape), expert)
    np.testing.assert_allclose(np.reshape(data["gate"], gate.shape), gate, atol=1e-4)
    for (attributes, _), chosen in zip(page.spans, expert[0, :, 0], strict=True):
        assert attributes["data-e"] == str(chosen)
        assert f"e{chosen}" in attributes["class"].split()
        assert ("empty" in attributes["class"].split()) == (chosen == 4)


def test_share_counts_first_choices_and_unrouted_tokens():
    # First choices 0, 0, 2, unrouted (4): shares 2/4, 0, 1/4, 0 and 1/4 unrouted.
    expert = np.array([[[0, 1], [0, 2], [2, 0], [4, 4]]])
    gate = np.where(expert < 4, 0.5, 0.0)
    page = Page(token_map_html([b"a", b"b", b"c", b"d"], expert, gate, 4, title=""))
    assert page.data["share"] == [[0.5, 0, 0.25, 0, 0.25]]


ATTACKS = [
    b"<script>alert(1)</script>",
    b"</script><script>alert(1)</script>",
    b"<!-- ",
    b"]]>",
    b'" onmouseover="alert(1)" x="',
    b"' onclick='alert(1)",
    b"&lt;b&gt; & &amp;",
    b"</span></div></style>",
    b"<img src=x onerror=alert(1)>",
    b"@SCRIPT@ @DATA@",
    b"\\u003cb\\u003e",
]


def test_text_never_becomes_markup():
    attack = "".join(token.decode() for token in ATTACKS)
    plain, _, _ = make([b"x"] * len(ATTACKS), layers=["a", "b"], note="n")
    page, _, _ = make(ATTACKS, layers=[attack, attack], title=attack, note=attack)
    assert page.texts == [token.decode() for token in ATTACKS]
    assert page.title == attack
    assert page.data["layers"] == [attack, attack]
    assert page.tags == plain.tags
    assert len(page.attributes) == len(plain.attributes)
    assert page.scripts[1:] == plain.scripts[1:]


def test_page_stands_alone():
    page, _, _ = make([b"a", b"b"])
    assert not [a for a in page.attributes if a[1] in ("src", "href", "action", "style", "srcset")]
    assert not [a for a in page.attributes if a[1].startswith("on")]
    everything = "".join(page.styles + page.scripts)
    assert not re.search(r"https?:|url\(|@import|fetch\(|XMLHttp|import\(", everything)
    written = r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(|\.cssText"
    assert not re.search(written, everything)


def test_policy_allows_this_style_and_script_only():
    page, _, _ = make([b"a"])

    def digest(text):
        return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    assert len(page.scripts) == 2 and len(page.styles) == 1
    assert page.policy.split("; ") == [
        "default-src 'none'",
        f"style-src 'sha256-{digest(page.styles[0])}'",
        f"script-src 'sha256-{digest(page.scripts[1])}'",
        "base-uri 'none'",
        "form-action 'none'",
    ]


@pytest.mark.parametrize(
    "tokens, texts",
    [
        ([b"caf\xc3", b"\xa9!"], ["café", "!"]),  # the second byte of é opens the second token
        ([b"\xe2", b"\x82", b"\xac"], ["€", "·", "·"]),
        ([b"\xf0\x9f", b"\x8e\x89 \xc3", b"\xa9"], ["🎉", " é", "·"]),
        ([b"\xff", b"a\xc3", b"b"], ["\ufffd", "a\ufffd", "b"]),
        ([b"\xe2\x82"], ["\ufffd\ufffd"]),  # cut off by the end of the passage
        ([b"\xed\xa0\x80"], ["\ufffd" * 3]),  # a surrogate is no character
        ([b"\xc0\xaf", b"\xf5"], ["\ufffd" * 2, "\ufffd"]),  # overlong; past U+10FFFF
        ([b"a\n", b"\tb", b" "], ["a⏎\n", "⇥b", " "]),
        ([b"\x00\x1b\x7f"], ["␀␛[U+007F]"]),
        (["\u202eabc\u200d".encode()], ["[U+202E]abc[U+200D]"]),
        (["\u2028\ue000".encode()], ["[U+2028][U+E000]"]),
        ([b"e", "\u0301".encode()], ["e", "◌\u0301"]),
        ([b"a", b"", b"b"], ["a", "◇", "b"]),
        ([b"", b"\xc3", b"", b"\xa9"], ["◇", "é", "◇", "·"]),
    ],
)
def test_bytes_are_shown_sensibly(tokens, texts):
    page, _, _ = make(tokens)
    assert page.texts == texts


def test_labels_name_the_bytes():
    page, _, _ = make([b"\xc3", b"\xa9", b"\n", b"x" * 30])
    assert page.labels == [
        "“é” c3",
        "a9, the rest of “é”",
        "“⏎” 0a",
        "“" + "x" * 30 + "” " + "78 " * 24 + "…",
    ]


def test_any_cut_of_any_bytes_gives_one_span_a_token():
    rng = np.random.default_rng(1)
    text = "naïve — 日本語 🎉 e\u0301 <&>".encode()
    for trial in range(60):
        data = text if trial % 2 else rng.integers(0, 256, 40, dtype=np.uint8).tobytes()
        cuts = [0, *sorted(rng.integers(0, len(data) + 1, 9)), len(data)]
        tokens = [data[a:b] for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
        page, _, _ = make(tokens, num_layers=1, k=1)
        assert len(page.spans) == len(tokens)
        assert all(text for text in page.texts)
        if trial % 2:
            assert re.sub("[·◇◌]", "", "".join(page.texts)).encode() == text


@pytest.mark.parametrize("num_experts", [1, 8, 9, 64])
def test_every_expert_has_its_own_readable_colour(num_experts):
    rules = "\n".join(token_map._expert_rules(num_experts))
    found = re.findall(r"\.e(\d+) \{ --fill: (#[0-9a-f]{6}); --ink: #(000|fff); \}", rules)
    assert [int(index) for index, _, _ in found] == list(range(num_experts))
    assert len({colour for _, colour, _ in found}) == num_experts
    for _, colour, ink in found:
        low, high = sorted([token_map._luminance(colour), 0.0 if ink == "000" else 1.0])
        assert (high + 0.05) / (low + 0.05) >= 4.5  # WCAG 2, level AA


@pytest.mark.parametrize(
    "replaced, message",
    [
        ({"tokens": []}, "tokens: got none"),
        ({"tokens": [b"a", "b"]}, r"tokens\[1\]: got str; allowed: bytes"),
        ({"tokens": [b"a"]}, r"shape \(1, 2, 2\); allowed: \[L, 1, K\]"),
        ({"expert": np.zeros((1, 2), int)}, r"shape \(1, 2\)"),
        ({"expert": np.zeros((1, 2, 2))}, "dtype float64; allowed: integers"),
        ({"expert": np.full((1, 2, 2), 5)}, r"got 5\.\.5; allowed: 0\.\.4"),
        ({"expert": np.full((1, 2, 2), -1)}, r"got -1\.\.-1"),
        ({"gate": np.zeros((1, 2, 1))}, r"gate: got shape \(1, 2, 1\)"),
        ({"gate": np.full((1, 2, 2), np.nan)}, "not finite"),
        ({"layers": ["a", "b"]}, "got 2 labels; allowed: 1"),
    ],
)
def test_errors(replaced, message):
    arguments = {
        "tokens": [b"a", b"b"],
        "expert": np.zeros((1, 2, 2), int),
        "gate": np.zeros((1, 2, 2)),
        "layers": None,
    } | replaced
    with pytest.raises(ValueError, match=message):
        token_map_html(**arguments, num_experts=4, title="")
