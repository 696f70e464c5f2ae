"""Picture of a report, by headless Chromium: `python docs/make/report.py REPORT.html PICTURE.png [TOP BOTTOM]`.

The page is drawn 1,280 pixels wide; TOP and BOTTOM are the pixels of the part that is kept.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

WIDTH, HEIGHT = 1280, 6000


def main() -> None:
    """Draw the page, and write a part of it with few colours."""
    report, picture, *part = sys.argv[1:]
    top, bottom = map(int, part or (0, 1500))
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder, "page.png")
        window = (
            f"--window-size={WIDTH},{HEIGHT}",
            "--hide-scrollbars",
            "--virtual-time-budget=20000",
        )
        scheme = ("--blink-settings=preferredColorScheme=1", f"--user-data-dir={folder}/profile")
        command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", *window, *scheme]
        subprocess.run(
            [*command, f"--screenshot={shot}", Path(report).resolve().as_uri()], check=True
        )
        with Image.open(shot) as image:
            cut = image.convert("RGB").crop((0, top, WIDTH, bottom))
        cut.quantize(64).save(picture, optimize=True)


if __name__ == "__main__":
    main()
