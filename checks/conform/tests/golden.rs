//! The golden cases on every local device, and that the runner tells wrong from right.

use kiln_conform::golden::{GoldenError, Outcome, Summary, run};
use kiln_tensor::Device;
use std::fs;
use std::path::{Path, PathBuf};

fn cases() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("cases")
}

fn all(dir: &Path, device: &Device) -> (Result<Summary, GoldenError>, Vec<Outcome>) {
    let mut outcomes = Vec::new();
    let summary = run(dir, device, &mut |outcome| outcomes.push(outcome.clone()));
    (summary, outcomes)
}

/// Cases with attributes of every kind, made by the script beside them.
fn made(theme: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(theme)
}

#[track_caller]
fn passes(device: &Device) {
    for (dir, count) in [(cases(), 414), (made("functions"), 201), (made("layers"), 50)] {
        let (summary, outcomes) = all(&dir, device);
        let failed: Vec<&Outcome> = outcomes.iter().filter(|o| o.failure.is_some()).collect();
        assert!(failed.is_empty(), "{failed:#?}");
        assert_eq!(summary.unwrap(), Summary { passed: count, failed: 0 });
    }
}

#[test]
fn cpu_passes() {
    passes(&Device::open("cpu:1").unwrap());
}

#[test]
fn cpu_passes_eagerly() {
    let device = Device::open("cpu:2").unwrap();
    device.set_eager(true);
    passes(&device);
}

#[test]
fn reference_passes() {
    passes(&Device::reference());
}

/// A folder with these lines as cases, and the tensors of the real ones.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str, lines: &str) -> Folder {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("golden-{name}"));
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("cases.jsonl"), lines).unwrap();
        fs::copy(cases().join("cases.safetensors"), dir.join("cases.safetensors")).unwrap();
        Folder(dir)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A real case with parts of its text replaced.
fn changed(id: &str, changes: &[(&str, &str)]) -> String {
    let text = fs::read_to_string(cases().join("cases.jsonl")).unwrap();
    let line = text.lines().find(|line| line.contains(&format!("\"{id}\""))).unwrap();
    changes.iter().fold(line.to_string(), |line, (from, to)| {
        assert!(line.contains(from), "{line} does not contain {from}");
        line.replace(from, to)
    })
}

/// What the runner says about one line.
fn verdict(name: &str, line: &str) -> Option<String> {
    let folder = Folder::new(name, line);
    let (summary, mut outcomes) = all(&folder.0, &Device::cpu());
    let outcome = outcomes.pop().unwrap();
    assert_eq!(summary.unwrap().failed, outcome.failure.is_some() as usize);
    outcome.failure
}

/// The id of the first case of an operator.
fn first(op: &str) -> String {
    let text = fs::read_to_string(cases().join("cases.jsonl")).unwrap();
    let line = text.lines().find(|line| line.contains(&format!("\"op\": \"{op}\""))).unwrap();
    let case: serde_json::Value = serde_json::from_str(line).unwrap();
    case["id"].as_str().unwrap().to_string()
}

#[test]
fn an_unchanged_case_passes() {
    assert_eq!(verdict("unchanged", &changed(&first("exp"), &[])), None);
}

#[test]
fn a_wrong_value_is_told_with_its_place_and_distance() {
    let failure =
        verdict("wrong", &changed(&first("exp"), &[("\"op\": \"exp\"", "\"op\": \"sin\"")])).unwrap();
    assert!(failure.starts_with("output 0: at ["), "{failure}");
    assert!(failure.contains("instead of") && failure.contains("off by"), "{failure}");
}

#[test]
fn a_wrong_gradient_is_told_apart_from_a_wrong_output() {
    let id = first("sub");
    let line = changed(&id, &[]);
    let case: serde_json::Value = serde_json::from_str(&line).unwrap();
    let names: Vec<&str> =
        case["grads"].as_array().unwrap().iter().map(|g| g["tensor"].as_str().unwrap()).collect();
    let swapped = line
        .replace(&format!("{}\"", names[1]), "swapped\"")
        .replace(&format!("{}\"", names[0]), &format!("{}\"", names[1]));
    let failure = verdict("gradient", &swapped).unwrap();
    assert!(failure.starts_with("gradient of input 0: "), "{failure}");
}

#[test]
fn a_wrong_shape_is_told() {
    let failure = verdict("shape", &changed(&first("unsqueeze"), &[("\"dim\": 1", "\"dim\": 0")])).unwrap();
    assert!(failure.starts_with("output 0: shape ["), "{failure}");
}

#[test]
fn an_unknown_operator_is_a_failure() {
    let failure =
        verdict("unknown", &changed(&first("exp"), &[("\"op\": \"exp\"", "\"op\": \"frobnicate\"")]));
    assert_eq!(failure.unwrap(), "operator `frobnicate` is not known");
}

#[test]
fn a_panic_inside_a_case_is_a_failure_with_its_message() {
    let failure = verdict("panic", &changed(&first("transpose"), &[("\"dim1\": 2", "\"dim1\": 7")])).unwrap();
    assert!(failure.starts_with("panicked: transpose: axis 7 is out of range"), "{failure}");
}

#[test]
fn a_bad_attribute_and_a_missing_tensor_are_failures() {
    let failure =
        verdict("attribute", &changed(&first("transpose"), &[("\"dim1\": 2", "\"dim1\": \"two\"")])).unwrap();
    assert!(failure.contains("`dim1`"), "{failure}");
    let id = first("exp");
    let case: serde_json::Value = serde_json::from_str(&changed(&id, &[])).unwrap();
    let tensor = case["inputs"][0]["tensor"].as_str().unwrap();
    let failure = verdict("tensor", &changed(&id, &[(&format!("\"{tensor}\""), "\"nowhere\"")])).unwrap();
    assert!(failure.contains("`nowhere` is not in the file"), "{failure}");
}

#[test]
fn bad_files_are_errors() {
    let device = Device::cpu();
    let missing = all(Path::new("no such folder"), &device).0.unwrap_err();
    assert!(matches!(missing, GoldenError::Read { .. }), "{missing}");

    let folder = Folder::new("line", &format!("{}\n{{\"id\": 3}}\n", changed(&first("exp"), &[])));
    let bad_line = all(&folder.0, &device).0.unwrap_err();
    assert!(matches!(bad_line, GoldenError::Case { line: 2, .. }), "{bad_line}");

    let folder = Folder::new("corrupt", &changed(&first("exp"), &[]));
    let path = folder.0.join("cases.safetensors");
    let whole = fs::read(&path).unwrap();
    for corrupt in [&whole[..whole.len() / 2], &whole[1..], &[][..], &[0xff; 64][..]] {
        fs::write(&path, corrupt).unwrap();
        let error = all(&folder.0, &device).0.unwrap_err();
        assert!(matches!(error, GoldenError::Tensors { .. }), "{error}");
    }
    fs::remove_file(&path).unwrap();
    let error = all(&folder.0, &device).0.unwrap_err();
    assert!(matches!(error, GoldenError::Read { .. }), "{error}");
}
