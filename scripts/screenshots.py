"""Shows pages of validations to a headless Chromium: screenshots at 360 and 1280 px and a PDF as printed,
and fails if a page is wider than its window, an SVG is empty, text in a chart is clipped or overlaps, or the page
asks for anything or says anything on the console.
python3 scripts/screenshots.py PAGES OUT
"""
import html, json, os, pathlib, re, shutil, subprocess, sys

chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if not chromium:
    print("screenshots SKIPPED: no Chromium (apt-get install chromium)", file=sys.stderr)
    sys.exit(1 if os.environ.get("REQUIRE_CHROMIUM") == "1" else 0)
pages, out = map(pathlib.Path, sys.argv[1:])
out.mkdir(parents=True, exist_ok=True)
# A window can't be narrower than 500 px, a frame can.
CHECK = """<script>onload = () => {
  const frame = document.querySelector('iframe'), d = frame.contentDocument, faults = [];
  const de = d.documentElement;
  if (de.scrollWidth > de.clientWidth) faults.push('wider than the window: ' + de.scrollWidth);
  for (const e of frame.contentWindow.performance.getEntriesByType('resource')) faults.push('request: ' + e.name);
  for (const svg of d.querySelectorAll('svg')) {
    const s = svg.getBoundingClientRect();
    if (!s.width || !s.height) faults.push('empty svg');
    const t = [...svg.querySelectorAll('text')].map(e => [e.textContent, e.getBoundingClientRect()]);
    t.forEach(([n, a], i) => {
      if (a.left < s.left - 1 || a.right > s.right + 1 || a.top < s.top - 1 || a.bottom > s.bottom + 1) faults.push('clipped: ' + n);
      for (const [m, b] of t.slice(i + 1)) if (a.left < b.right && b.left < a.right && a.top + 2 < b.bottom && b.top + 2 < a.bottom) faults.push('overlap: ' + n + ' / ' + m);
    });
  }
  document.body.dataset.faults = JSON.stringify(faults);
}</script>"""
bad = 0
for page in sorted(pages.glob("*.html")):
    def browse(*arguments):
        common = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                  "--enable-logging=stderr"]
        return subprocess.run([*common, *arguments], capture_output=True, text=True, timeout=180)
    for width in (360, 1280):
        frame = out / f"{page.stem}-{width}.html"
        frame.write_text(f'<body style="margin:0"><iframe style="border:0;width:{width}px;height:3000px" '
                         f'srcdoc="{html.escape(page.read_text())}"></iframe>{CHECK}')
        size = f"--window-size={max(width, 500)},3000"
        ran = browse(size, "--dump-dom", frame.resolve().as_uri())
        found = re.search(r'data-faults="([^"]*)"', ran.stdout)
        faults = json.loads(html.unescape(found[1])) if found else ["the check did not run"]
        faults += [f"console: {line}" for line in re.findall(r":CONSOLE[:(].*", ran.stderr)]
        for fault in faults[:20]:
            print(f"{page.stem} at {width} px: {fault}", file=sys.stderr)
        bad += len(faults)
        browse(size, f"--screenshot={out / (page.stem + f'-{width}.png')}", frame.resolve().as_uri())
        frame.unlink()
    browse(f"--print-to-pdf={out / (page.stem + '.pdf')}", page.resolve().as_uri())
print(f"{bad} faults")
sys.exit(bad > 0)
