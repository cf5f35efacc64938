//! Whether a step of an optimiser is applied: one word on the device, so that nothing is read back for it.

use crate::{DType, Device, Tensor};
use kiln_ir::{Binary, Op};

/// What becomes of a step whose gradients hold infinities or NaN. A gradient that could not be computed refuses the step
/// in any case.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum NonFinite {
    /// It is applied.
    #[default]
    Continue,
    /// It is not applied, which [`Device::events`] tells.
    Skip,
    /// It is not applied, and the next read or [`Device::sync`] fails with [`crate::Error::StepRefused`].
    Error,
}

/// Decides on the devices whether a step is applied: as a whole, or not at all.
///
/// ```
/// # use kiln_tensor::{Device, NonFinite, Step, Tensor};
/// let device = Device::cpu();
/// let (p, g) = (Tensor::ones([2], &device), Tensor::from_slice(&[f32::NAN, 1.0], [2], &device));
/// let step = Step::new(vec![("p".into(), g.clone())], &[], NonFinite::Skip);
/// let p = step.commit(&p - &g, &p);
/// assert_eq!(p.to_vec::<f32>().unwrap(), [1.0, 1.0]);
/// ```
pub struct Step {
    words: Vec<(Device, Option<Tensor>)>,
}

impl Step {
    /// A step along these gradients, named by the paths of their parameters, that also needs all of these words to be
    /// true, each a single bool. With gradients on several devices the words of all are brought together, which has the
    /// host wait where the devices have no way of their own to each other.
    ///
    /// # Panics
    /// If a device cannot decide, such as a server of an earlier version, and `nonfinite` asks it to. Where it does not,
    /// such a device applies every step.
    #[track_caller]
    pub fn new(gradients: Vec<(String, Tensor)>, words: &[Tensor], nonfinite: NonFinite) -> Step {
        let mut devices: Vec<(Device, Vec<String>, Vec<Tensor>)> = Vec::new();
        for (path, gradient) in gradients {
            let device = gradient.value.device();
            let at = devices.iter().position(|(d, ..)| d == device).unwrap_or_else(|| {
                devices.push((device.clone(), Vec::new(), Vec::new()));
                devices.len() - 1
            });
            devices[at].1.push(path);
            devices[at].2.push(gradient.detach());
        }
        let op = Op::Guard { finite: nonfinite != NonFinite::Continue };
        let mut own = Vec::new();
        for (device, paths, gradients) in devices {
            let metas: Vec<_> = gradients.iter().map(Tensor::meta).collect();
            if nonfinite == NonFinite::Continue
                && !device.runs_all()
                && !device.driver().supports(&op, &metas)
            {
                own.push((device, None));
                continue;
            }
            let word = Tensor::one(op.clone(), &gradients.iter().collect::<Vec<_>>());
            device.note_step(&word, paths, nonfinite == NonFinite::Skip);
            own.push((device, Some(word)));
        }
        let given: Vec<Tensor> =
            own.iter().filter_map(|(_, word)| word.clone()).chain(words.iter().cloned()).collect();
        if given.len() < 2 {
            return Step { words: own };
        }
        // What a device cannot give is no consent; it is told where that device is waited for.
        let at = |word: &Tensor, home: &Device| {
            word.detach().to_device(home).unwrap_or_else(|_| Tensor::full([], 0, DType::Bool, home))
        };
        let Some((home, _)) = own.first() else { return Step { words: own } };
        let here = given.iter().map(|word| at(word, home));
        let all = here.reduce(|a, b| Tensor::one(Op::Binary(Binary::And), &[&a, &b]));
        let everywhere = |home: &Device| all.as_ref().map(|all| at(all, home));
        Step { words: own.iter().map(|(home, _)| (home.clone(), everywhere(home))).collect() }
    }

    /// The devices that take part.
    pub fn devices(&self) -> impl Iterator<Item = &Device> {
        self.words.iter().map(|(device, _)| device)
    }

    /// Whether the step is applied, on one of these devices.
    pub fn word(&self, device: &Device) -> Option<&Tensor> {
        self.words.iter().find(|(d, _)| d == device)?.1.as_ref()
    }

    /// `new` if the step is applied, else `old`; both of one dtype and shape. What an optimiser keeps goes through this
    /// like the parameters.
    #[track_caller]
    pub fn commit(&self, new: Tensor, old: &Tensor) -> Tensor {
        match self.words.iter().find(|(device, _)| device == new.value.device()) {
            Some((_, Some(word))) => Tensor::one(Op::Commit, &[word, &new.detach(), &old.detach()]),
            Some((_, None)) | None => new,
        }
    }
}
