"""The corpus: what is let in, how it is split, what is kept apart."""

import email.message

from absl.testing import absltest, parameterized

from specpilot_jax.zoo import data, stages


def document(text, source="pkg/a.py") -> data.Document:
  return data.Document(source, "MIT", text)


class DataTest(parameterized.TestCase):
  @parameterized.parameters(
    (("License-Expression", "MIT"), "MIT"),
    (("License-Expression", "GPL-3.0-or-later"), None),
    (("License-Expression", "MIT AND LGPL-2.1"), None),
    (("Classifier", "License :: OSI Approved :: BSD License"), "BSD License"),
    (("License", "Apache 2.0\n\nlong text"), "Apache 2.0"),
    (("License", "Proprietary"), None),
    (("Name", "nothing-declared"), None),
  )
  def test_licence(self, field, expected):
    metadata = email.message.Message()
    metadata[field[0]] = field[1]
    self.assertEqual(data._licence(metadata), expected)

  def test_split_depends_on_the_content_alone(self):
    documents = [document(f"x = {i}\n" * 50) for i in range(3000)]
    held = [d for d in documents if data.is_held_out(d)]
    self.assertBetween(len(held), 15, 50)
    again = document(held[0].text, source="elsewhere/b.py")
    self.assertTrue(data.is_held_out(again))

  def test_more_of_the_documentation_is_held_out(self):
    texts = [f"Read this {i} times.\n" * 50 for i in range(1000)]
    held = sum(data.is_held_out(document(t, "pkg/README.md")) for t in texts)
    self.assertBetween(held, 70, 130)
    for i, text in enumerate(texts[:200]):
      if data.is_held_out(document(text)):
        self.assertTrue(data.is_held_out(document(text, f"pkg/{i}.rst")))

  def test_description(self):
    metadata = email.message.Message()
    metadata["Name"] = "pkg"
    self.assertIsNone(data._description(metadata))
    metadata.set_payload("\nWhat it does.\n" * 60)
    self.assertStartsWith(data._description(metadata) or "", "What it does.")

  def test_overlap_with_a_test_text_is_dropped(self):
    test = "return the sum of all even numbers in the given list of integers"
    copied = document(f"def f(x):\n  # {test}\n  return 1\n", "pkg/copied.py")
    own = document("def g(x):\n  return sum(v for v in x if v % 2 == 0)\n")
    kept, dropped = data.without_overlap([copied, own], [test])
    self.assertEqual(kept, [own])
    self.assertEqual(dropped, ["pkg/copied.py"])
    # Number tables match by chance and are no overlap.
    numbers = document("1 2 3 4 5 6 7 8 9 10 11 12\n")
    kept, _ = data.without_overlap([numbers], ["1 2 3 4 5 6 7 8 9 10 11 12"])
    self.assertEqual(kept, [numbers])

  def test_stream_closes_documents(self):
    texts = ["def f(x):\n  return x + 1\n" * 9, "class A:\n  pass\n" * 9]
    backend = stages.train_tokenizer(texts)
    stream = data.token_stream([document(t) for t in texts], backend, 0, seed=1)
    self.assertEqual(int((stream == 0).sum()), 2)
    self.assertEqual(int(stream[-1]), 0)
    runs = [backend.decode(run) for run in _split(stream.tolist())]
    self.assertCountEqual(runs, texts)

  def test_manifest(self):
    a, b = document("a" * 10), document("b" * 20, "other/b.py")
    manifest = data.manifest([a, b], [document("c" * 5)], ["x/y.py"])
    self.assertEqual(manifest["train_bytes"], 30)
    self.assertEqual(manifest["held_out_bytes"], 5)
    self.assertEqual(
      manifest["sources"]["other"], {"licence": "MIT", "bytes": 20}
    )
    self.assertLen(manifest["train_sha256"], 64)


def _split(ids):
  run = []
  for token in ids:
    if token == 0:
      yield run
      run = []
    else:
      run.append(token)


if __name__ == "__main__":
  absltest.main()
