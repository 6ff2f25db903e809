"""The conversation of the demo and of the restore benchmark: an agent with tools and a long manual.

Pure text, the same in every run. The system prompt is what real agents send with each request:
a role, rules, tool schemas and a manual. Users differ after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]

ROLE = (
    "You are the operations assistant of Northwind Rail, a freight operator. You help dispatchers "
    "with trains, wagons, drivers and customers. Answer briefly and name your sources."
)

TOOL_NAMES: Sequence[tuple[str, str, Sequence[tuple[str, str]]]] = (
    ("find_train", "Find trains by number, route or time", (("number", "train number"),)),
    ("list_wagons", "List the wagons of a train", (("train", "train number"),)),
    ("driver_hours", "Hours a driver has worked", (("driver", "driver id"), ("day", "date"))),
    ("weather", "Weather along a route", (("route", "route code"), ("hours", "hours ahead"))),
    ("book_path", "Book a path on a line", (("line", "line code"), ("departure", "time"))),
    ("customer", "Look up a customer", (("name", "customer name"),)),
    ("delay_report", "Delays of a line in the last hours", (("line", "line code"),)),
    ("yard_state", "Tracks and wagons in a yard", (("yard", "yard code"),)),
)

TOPICS = (
    ("dangerous goods", "the placard, the wagon list and the two contacts on duty"),
    ("late departures", "the cause code, the new path and the customers that wait"),
    ("driver rest", "eleven hours between shifts and thirty minutes in every five hours"),
    ("wagon defects", "the defect code, the yard that can mend it and who carries the load on"),
    ("winter service", "heated switches, sand, and a reserve engine in each large yard"),
    ("line closures", "the diversion, its axle load and the extra running time"),
    ("customs", "the transit paper, the seal numbers and the office that is open"),
    ("empty runs", "the nearest load, the wagon class and the price below which to refuse"),
)

USERS: Sequence[tuple[str, Sequence[tuple[str, str]]]] = (
    (
        "Amal",
        (
            (
                "Train 4711 stands in Halden. What is first?",
                "The cause code, then the path.",
            ),
            (
                "The driver has worked nine hours. Go on?",
                "Only after thirty minutes of rest.",
            ),
            ("And which customers wait for this train?", ""),
        ),
    ),
    (
        "Bo",
        (
            ("A wagon in yard K3 has defect code 52. Where is it mended?", "Yard K7 can mend it."),
            ("Who carries the load on until then?", ""),
        ),
    ),
    ("Chidi", (("Is line 12 open for 22 tonnes of axle load tonight?", ""),)),
)


def tools() -> list[dict[str, Any]]:
    """Tool schemas in the form that chat templates take."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": description,
                "parameters": {
                    "type": "object",
                    "properties": {
                        key: {"type": "string", "description": what} for key, what in fields
                    },
                    "required": [fields[0][0]],
                },
            },
        }
        for name, description, fields in TOOL_NAMES
    ]


def manual(sections: int) -> str:
    """A manual of `sections` numbered sections, about 75 tokens each; no two are equal."""
    parts = []
    for index in range(sections):
        topic, rule = TOPICS[index % len(TOPICS)]
        edition = index // len(TOPICS) + 1
        parts.append(
            f"Section {index + 1}: {topic}, part {edition}. In case {100 + 7 * index} the "
            f"dispatcher first notes {rule}. If nobody answers within {5 + index % 9} minutes, "
            f"desk {index % 6 + 1} decides and writes entry {1000 + 13 * index} into the log. "
            f"The night shift reads it before {index % 5 + 4} o'clock."
        )
    return "\n".join(parts)


def system_prompt(sections: int) -> str:
    """Role, tools and manual as one text, for templates that know no tools of their own."""
    listed = "\n".join(f"- {each['function']}" for each in tools())
    return f"{ROLE}\n\nTools you can call:\n{listed}\n\nManual:\n{manual(sections)}"


def conversation(system: str, user: int, turns: int) -> list[Message]:
    """The messages of one user's conversation up to and including question `turns`."""
    name, exchanges = USERS[user]
    messages: list[Message] = [{"role": "system", "content": system}]
    for index, (question, answer) in enumerate(exchanges[:turns]):
        asked = f"{name}: {question}" if index == 0 else question
        messages.append({"role": "user", "content": asked})
        if index + 1 < turns:
            messages.append({"role": "assistant", "content": answer})
    return messages
