"""The prompts that generation is timed with: one to warm up, then nine of three kinds, code, literature, arithmetic."""

from __future__ import annotations

WARM_UP = "Name three rivers of Europe and the sea that each of them flows into."

PROMPTS = (
    # Code.
    "Write a Python function that returns the longest run of equal characters in a string, and explain each line.",
    "Here is a SQL table orders(id, customer, day, amount). Write a query that gives each customer's largest order of "
    "every month, and say which index would help.",
    "Explain what this C function does and where it can go wrong:\n\n"
    "int find(const int *a, int n, int x) {\n    int lo = 0, hi = n;\n    while (lo < hi) {\n"
    "        int mid = (lo + hi) / 2;\n        if (a[mid] < x) lo = mid + 1; else hi = mid;\n    }\n"
    "    return a[lo] == x ? lo : -1;\n}\n",
    # Literature.
    "Tell the story of a lighthouse keeper who finds a letter in a bottle, in the words of an old novel.",
    "Compare how Homer and Virgil let their heroes leave home, and what each journey says about duty.",
    "Write a short poem about the first snow in a harbour town, and then say in two sentences how its rhythm works.",
    # Arithmetic.
    "A train leaves at 9:40 and travels 156 km at 72 km/h, waits 25 minutes, and goes on for 90 km at 60 km/h. "
    "When does it arrive? Show every step.",
    "Divide 7,392 by 48 by hand and check the result by multiplication.",
    "A shop lowers a price by 20 percent and a week later raises it by 25 percent. Compare the last price with the "
    "first for a coat of 140 euros, and explain the result in general.",
)
