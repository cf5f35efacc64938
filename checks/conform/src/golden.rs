//! Golden cases: operators with inputs, outputs and gradients computed elsewhere, run on a device and compared.
//!
//! A folder holds `cases.jsonl`, one case per line, and `cases.safetensors`, the tensors by name. Each case goes through
//! the table of operators (`ops`), its outputs and gradients are read back and compared (`compare`), and an [`Outcome`]
//! is handed to the caller at once. A bad file is a [`GoldenError`]; whatever goes wrong inside a case, a panic
//! included, is that case's failure.

mod attrs;
mod compare;
mod functions;
mod layers;
mod losses;
mod ops;
mod options;
mod quiet;
mod sequences;

use attrs::Attrs;
use kiln_tensor::{DType, Data, Device, Tensor};
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// What became of a case.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// The case's name.
    pub id: String,
    /// What differed, where and by how much; `None` if the case passed.
    pub failure: Option<String>,
}

/// How many cases passed and failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[allow(missing_docs)]
pub struct Summary {
    pub passed: usize,
    pub failed: usize,
}

/// Why cases could not be run at all.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum GoldenError {
    #[error("{path}: {source}", path = path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path}, line {line}: {source}", path = path.display())]
    Case { path: PathBuf, line: usize, source: serde_json::Error },
    #[error("{path}: {source}", path = path.display())]
    Tensors { path: PathBuf, source: safetensors::SafeTensorError },
}

/// Runs every case of `dir` on `device`.
pub fn run(dir: &Path, device: &Device, report: &mut dyn FnMut(&Outcome)) -> Result<Summary, GoldenError> {
    let cases = cases(&dir.join("cases.jsonl"))?;
    let path = dir.join("cases.safetensors");
    let bytes = read(&path)?;
    let tensors = match SafeTensors::deserialize(&bytes) {
        Ok(tensors) => tensors,
        Err(source) => return Err(GoldenError::Tensors { path, source }),
    };
    let mut summary = Summary::default();
    for case in cases {
        let failure = quiet::caught(|| check(&case, &tensors, device)).and_then(|result| result).err();
        match failure {
            None => summary.passed += 1,
            Some(_) => summary.failed += 1,
        }
        report(&Outcome { id: case.id, failure });
    }
    Ok(summary)
}

#[derive(Deserialize)]
struct Case {
    id: String,
    op: String,
    #[serde(default)]
    attrs: Attrs,
    inputs: Vec<TensorRef>,
    outputs: Vec<TensorRef>,
    #[serde(default)]
    grads: Vec<Grad>,
    rel: f64,
    abs: f64,
}

#[derive(Deserialize)]
struct TensorRef {
    tensor: String,
    dtype: DType,
    #[serde(default)]
    cotangent: Option<String>,
}

#[derive(Deserialize)]
struct Grad {
    input: usize,
    tensor: String,
}

fn read(path: &Path) -> Result<Vec<u8>, GoldenError> {
    std::fs::read(path).map_err(|source| GoldenError::Read { path: path.into(), source })
}

fn cases(path: &Path) -> Result<Vec<Case>, GoldenError> {
    let bytes = read(path)?;
    let lines = bytes.split(|&b| b == b'\n').enumerate();
    lines
        .filter(|(_, line)| !line.trim_ascii().is_empty())
        .map(|(i, line)| {
            let line = attrs::with_words_for_infinities(line);
            serde_json::from_slice(&line).map_err(|source| GoldenError::Case {
                path: path.into(),
                line: i + 1,
                source,
            })
        })
        .collect()
}

/// Runs one case. What it says is what differed.
fn check(case: &Case, tensors: &SafeTensors<'_>, device: &Device) -> Result<(), String> {
    let load = |name: &str| load(tensors, name);
    let mut inputs = Vec::with_capacity(case.inputs.len());
    for (i, stored) in case.inputs.iter().enumerate() {
        let data = load(&stored.tensor)?;
        if data.meta.dtype != stored.dtype {
            return Err(format!(
                "input {i} is said to be {}, but is stored as {}",
                stored.dtype, data.meta.dtype
            ));
        }
        let tensor = Tensor::from_data(data, device);
        let tracked = case.grads.iter().any(|grad| grad.input == i);
        inputs.push(if tracked { tensor.requires_grad() } else { tensor });
    }
    let outputs = ops::apply(&case.op, &case.attrs, &inputs)?;
    if outputs.len() != case.outputs.len() {
        return Err(format!("{} outputs instead of {}", outputs.len(), case.outputs.len()));
    }
    for (i, (got, want)) in outputs.iter().zip(&case.outputs).enumerate() {
        let data = got.to_data().map_err(|e| format!("output {i}: {e}"))?;
        compare::same(&data, &load(&want.tensor)?, case.rel, case.abs)
            .map_err(|e| format!("output {i}: {e}"))?;
    }
    if case.grads.is_empty() {
        return Ok(());
    }
    let mut total: Option<Tensor> = None;
    for (got, want) in outputs.iter().zip(&case.outputs) {
        if let Some(name) = &want.cotangent
            && got.is_tracked()
        {
            let part = (got * Tensor::from_data(load(name)?, device)).sum(());
            total = Some(match total {
                Some(sum) => sum + part,
                None => part,
            });
        }
    }
    let gradients = total.map(|total| total.backward()).unwrap_or_default();
    for grad in &case.grads {
        let what = |e: String| format!("gradient of input {}: {e}", grad.input);
        let input = inputs.get(grad.input).ok_or_else(|| what("there is no such input".into()))?;
        let got = gradients.get_or_zeros(input).to_data().map_err(|e| what(e.to_string()))?;
        compare::same(&got, &load(&grad.tensor)?, case.rel, case.abs).map_err(what)?;
    }
    Ok(())
}

fn load(tensors: &SafeTensors<'_>, name: &str) -> Result<Data, String> {
    let view = tensors.tensor(name).map_err(|_| format!("tensor `{name}` is not in the file"))?;
    let dtype = match view.dtype() {
        Dtype::F64 => DType::F64,
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::I64 => DType::I64,
        Dtype::I32 => DType::I32,
        Dtype::I16 => DType::I16,
        Dtype::I8 => DType::I8,
        Dtype::U64 => DType::U64,
        Dtype::U32 => DType::U32,
        Dtype::U16 => DType::U16,
        Dtype::U8 => DType::U8,
        Dtype::BOOL => DType::Bool,
        other => return Err(format!("tensor `{name}` is stored as {other:?}, which no operator takes")),
    };
    let shape = kiln_ir::Dims::try_new(view.shape()).ok_or_else(|| {
        format!("tensor `{name}` has {} axes, more than a tensor can have", view.shape().len())
    })?;
    let meta = kiln_ir::Meta { dtype, shape };
    if meta.check().is_err() || view.data().len() != meta.bytes() {
        return Err(format!("tensor `{name}` is stored as {meta} in {} bytes", view.data().len()));
    }
    Ok(Data::new(meta, kiln_device::Bytes::new(view.data().to_vec())))
}
