"""
Serve predictions without this package
======================================

A ``torch.export`` file needs torch, but not sklaplace, scikit-learn or skorch.
"""

import json
import sys
import tempfile
from pathlib import Path
from subprocess import PIPE, Popen
from timeit import timeit
from urllib.request import urlopen

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_diabetes

from sklaplace import LaplaceRegressor

# %%
# ``to_module`` returns the predictions as a torch module; see :ref:`to_module`.
X, y = load_diabetes(return_X_y=True)
model = LaplaceRegressor(random_state=0).fit(X, y)
module, rows = model.to_module(coverage=0.9), torch.from_numpy(X)
options = {"dynamic_shapes": [{0: torch.export.Dim.DYNAMIC}], "strict": False}
program = torch.export.export(module, (rows[:2],), **options)
# %%
# A new Python process loads the file and answers one HTTP request.
server = """
import http.server, json, torch
predict = torch.export.load("model.pt2").module()
class Handler(http.server.BaseHTTPRequestHandler):
    log_message = lambda *_: None
    def do_POST(self):
        rows = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        _, _, interval = predict(torch.tensor(rows, dtype=torch.float64))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(interval.tolist()).encode())
host = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(host.server_port, flush=True)
host.handle_request()
"""
with tempfile.TemporaryDirectory() as folder:
    torch.export.save(program, Path(folder, "model.pt2"))
    with Popen([sys.executable, "-c", server], cwd=folder, stdout=PIPE) as process:
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        served = json.load(urlopen(url, b"%a" % X[:1].tolist()))
print(f"served {served}, predict_interval {model.predict_interval(X[:1]).tolist()}")
of_estimator = 10 * timeit(lambda: model.predict_interval(X[:1]), number=100)
of_module = 10 * timeit(lambda: module(rows[:1]), number=100)
bars = plt.barh(["module", "estimator"], [of_module, of_estimator])
plt.bar_label(bars, fmt="%.1f ms", padding=3)
plt.gca().set(xlabel="milliseconds for one row", xlim=(0, 1.2 * of_estimator))
plt.show()
# %%
# The served interval equals the interval of the estimator up to rounding. For one row,
# the module is faster than the estimator.
