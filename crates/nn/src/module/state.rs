//! State dicts: a model's parameters and buffers by path, given and taken over.

use crate::Module;
use kiln_tensor::{Error, Meta, Tensor};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::{Display, Formatter};

/// What became of a state dict, and of what the model wanted from it.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct LoadReport {
    /// How many parameters and buffers were taken over.
    pub loaded: usize,
    /// Paths of the model that are not in the state.
    pub missing: Vec<String>,
    /// Names in the state that are not in the model.
    pub unused: Vec<String>,
    /// Paths with what the model has and what the state has, which do not fit.
    pub mismatched: Vec<(String, Meta, Meta)>,
    /// Paths that were converted from another float dtype, with what the state has.
    pub converted: Vec<(String, Meta)>,
}

impl LoadReport {
    /// Whether everything was there, wanted and fit.
    pub fn is_clean(&self) -> bool {
        self.missing.is_empty() && self.unused.is_empty() && self.mismatched.is_empty()
    }
}

/// The longest list that is shown in full.
const SHOWN: usize = 10;

fn list<T>(f: &mut Formatter<'_>, title: &str, items: &[T], line: impl Fn(&T) -> String) -> std::fmt::Result {
    if items.is_empty() {
        return Ok(());
    }
    write!(f, "\n  {} {title}:", items.len())?;
    items.iter().take(SHOWN).try_for_each(|item| write!(f, "\n    {}", line(item)))?;
    match items.len().checked_sub(SHOWN) {
        Some(more @ 1..) => write!(f, "\n    and {more} more"),
        _ => Ok(()),
    }
}

impl Display for LoadReport {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} loaded", self.loaded)?;
        list(f, "missing in the state", &self.missing, String::clone)?;
        list(f, "unused by the model", &self.unused, String::clone)?;
        let differs =
            |(path, want, got): &(String, Meta, Meta)| format!("{path}: {want} here, {got} in the state");
        list(f, "of another shape or kind", &self.mismatched, differs)?;
        list(f, "converted", &self.converted, |(path, got)| format!("{path} from {}", got.dtype))
    }
}

/// Why a state dict was not taken over.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// It does not fit the model, and was to fit exactly.
    #[error("the state does not fit the model: {0}")]
    Misfit(LoadReport),
    /// A tensor could not be brought to the model's device.
    #[error(transparent)]
    Device(#[from] Error),
}

pub(super) fn state_dict(module: &(impl Module + ?Sized)) -> BTreeMap<String, Tensor> {
    let mut state = BTreeMap::new();
    module.visit("", &mut |path, tensor| drop(state.insert(path.to_string(), tensor.detach())));
    module.visit_buffers("", &mut |path, buffer| drop(state.insert(path.to_string(), buffer.get())));
    state
}

/// What is to be loaded: parameters in the order of [`Module::distinct`], then buffers in theirs.
pub(super) struct LoadPlan {
    pub report: LoadReport,
    parameters: Vec<Option<Tensor>>,
    buffers: Vec<Option<Tensor>>,
}

/// Nothing is changed here.
pub(super) fn plan(module: &(impl Module + ?Sized), state: &BTreeMap<String, Tensor>) -> LoadPlan {
    let mut report = LoadReport::default();
    let mut used = BTreeSet::new();
    // All paths of a tied parameter, in the order in which the parameters come.
    let (mut wanted, mut places): (Vec<(Vec<String>, Meta)>, HashMap<_, usize>) = Default::default();
    module.visit("", &mut |path, tensor| {
        let at = *places.entry(tensor.identity()).or_insert_with(|| {
            wanted.push((Vec::new(), tensor.meta()));
            wanted.len() - 1
        });
        wanted[at].0.push(path.to_string());
    });
    let mut find = |paths: Vec<String>, want: Meta| {
        let found = paths.iter().find_map(|path| Some((path, state.get(path)?)));
        used.extend(paths.iter().filter(|path| state.contains_key(*path)).cloned());
        let Some((path, got)) = found else {
            report.missing.extend(paths.into_iter().next());
            return None;
        };
        let got_meta = got.meta();
        let convertible = got_meta.dtype.is_float() && want.dtype.is_float();
        if got_meta.shape != want.shape || got_meta.dtype != want.dtype && !convertible {
            report.mismatched.push((path.clone(), want, got_meta));
            return None;
        }
        if got_meta.dtype != want.dtype {
            report.converted.push((path.clone(), got_meta));
        }
        report.loaded += 1;
        Some(got.detach())
    };
    let parameters = wanted.into_iter().map(|(paths, meta)| find(paths, meta)).collect();
    let mut buffers = Vec::new();
    module.visit_buffers("", &mut |path, buffer| {
        buffers.push(find(vec![path.to_string()], buffer.get().meta()))
    });
    report.unused = state.keys().filter(|name| !used.contains(*name)).cloned().collect();
    LoadPlan { report, parameters, buffers }
}

/// Everything is brought to its device before anything changes.
pub(super) fn load(module: &mut (impl Module + ?Sized), plan: LoadPlan) -> Result<LoadReport, LoadError> {
    let fitted = |new: Option<Tensor>, old: &Tensor| -> Result<Option<Tensor>, Error> {
        let device = old.device();
        let Some(new) = new else { return Ok(None) };
        let new = device.persistent(|| new.to_device(&device))?.to_dtype(old.dtype());
        Ok(Some(if old.is_leaf() { new.requires_grad() } else { new }))
    };
    let mut parameters = Vec::new();
    for (new, (_, old)) in plan.parameters.into_iter().zip(module.distinct()) {
        parameters.push(fitted(new, &old)?);
    }
    let mut buffers = Vec::new();
    for (new, (_, old)) in plan.buffers.into_iter().zip(module.buffers()) {
        buffers.push(fitted(new, &old)?);
    }
    let (mut parameters, mut buffers) = (parameters.into_iter(), buffers.into_iter());
    module.replace(&mut |_, _| parameters.next().flatten());
    module.visit_buffers("", &mut |_, buffer| {
        buffers.next().flatten().into_iter().for_each(|new| buffer.load(new));
    });
    Ok(plan.report)
}
