"""Texts on which split patterns and normalisers differ: contractions, numbers, blanks, line ends, composed letters, scripts.

A separate file, because these texts are inputs that test a tokenizer, and not messages.
"""

from __future__ import annotations

PROBES = (
    "I'll say it's DON'T, they've; we'RE here 'twas",
    "in 2024 the 1234567 of 12.5% and v1.0.3, ½ x² Ⅷ ٣٤٥",
    "def f(x):\n    return x  # twice\n\n\n\tdone\r\n   \n  end  ",
    "  leading, two  inner,   three and trailing   ",
    "http://a.b/c?d=e_f&g=--h!!! ...\n\n(*[]{}*)<|>\x0b\x0c",
    "naïve café cafe\u0301 ſ \u212b ﬁ straße Ωμέγα",
    "日本語の文章です。中文字符，한국어 ไทย हिन्दी עברית",
    "emoji 👩‍👩‍👧 ☃\ufe0f\u00a0nbsp\u2003em\u200bzero\u2028line",
    "CamelCaseHTTPServer snake_case_42 ALLCAPS iOS x1y2",
    "\n",
    " ",
    "",
)
